"""Another build of ggml than the wheel's: the owner chooses it by an environment variable, and it is tried before it is used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from swarmnode.compute.packing.ggml import (
    DTYPES,
    FORMATS,
    OWN_BUILD,
    PACKAGE,
    TRIED_OUTPUTS,
    TRIED_ROWS,
    GgmlMatrix,
)
from swarmnode.errors import LocalError

TRIED = "_SWARMNODE_GGML_TRIED"
"""Environment variable of the process that tries a build"""
MAX_TOLD_CHARS = 200
LIBRARIES, TRIAL_S = ("ggml-base", "ggml-cpu", "ggml"), 120.0
INPUTS, MOST_LOST = 512, {"exact": 1e-4, "fast": 0.03}
"""Width of the tried matrices, and the largest share of a product that rounding may take"""


L = TypeVar("L")


def load_own(path: Path, load: Callable[[Sequence[Path]], L]) -> L:
    """Return what `load` makes of the files of a build of ggml. `path` is a library, or a folder with ggml's libraries.

    The build is tried in a process of its own first, as ggml may end the process. Raises LocalError if it cannot be used.
    """
    ends = {"darwin": ".dylib", "win32": ".dll"}
    start = "" if sys.platform == "win32" else "lib"
    files = [path]
    if path.is_dir():
        files = [path / f"{start}{name}{ends.get(sys.platform, '.so')}" for name in LIBRARIES]
        files = [file for file in files if file.is_file()]
    why = ""
    if not files or not files[0].is_file():
        why = f"there is no library {start}{LIBRARIES[1]}"
    elif not os.environ.get(TRIED):
        program = f"from {__name__} import try_products; try_products()"
        try:
            tried = subprocess.run(
                [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
                env={**os.environ, TRIED: "1"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_S,
            )
            if tried.returncode < 0:
                why = f"it ended a process that tried it ({signal.Signals(-tried.returncode).name})"
            elif tried.returncode:
                why = (
                    tried.stdout.strip() or f"a process that tried it failed: {tried.stderr.strip()[-MAX_TOLD_CHARS:]}"
                )
        except (OSError, subprocess.SubprocessError) as error:
            why = f"a process that tried it did not end ({type(error).__name__})"
    if not why:
        try:
            return load(files)
        except (AttributeError, OSError) as error:
            why = str(error)
    if os.environ.get(TRIED):
        raise LocalError(why)
    raise LocalError(
        f"{OWN_BUILD}={path} cannot be used: {why}. Give a build of ggml for this CPU with shared libraries, of about the version "
        f"that {PACKAGE} has, or unset {OWN_BUILD}"
    )


def try_products() -> None:
    """Compare the chosen build's products with those of the values that the package gguf dequantises.

    For a process of its own: it prints the first difference, or why the build cannot be loaded, and ends with 1.
    """
    try:
        wrong = next(filter(None, map(_difference, FORMATS)), "")
    except LocalError as error:
        wrong = str(error)
    if wrong:
        print(wrong)
        raise SystemExit(1)


def _difference(name: str) -> str:
    """Return how products of a matrix in the format `name` differ from what they must be; empty if they do not."""
    import gguf

    form, draw = FORMATS[name], torch.Generator().manual_seed(0)
    rows_OB = torch.randint(0, 256, (TRIED_OUTPUTS, form.row_bytes(INPUTS)), generator=draw).to(torch.uint8)
    blocks_NB = rows_OB.view(-1, form.block_bytes)
    for at in form.scales:
        blocks_NB[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if name in DTYPES:
        rows_OB = torch.randn(TRIED_OUTPUTS, INPUTS, generator=draw).to(DTYPES[name]).view(torch.uint8)
    elif not form.scales:  # MXFP4: a scale is a power of two
        blocks_NB[:, 0] = 120
    values = gguf.dequantize(rows_OB.numpy(), gguf.GGMLQuantizationType[name])
    weight_OI = torch.from_numpy(np.copy(values)).view(TRIED_OUTPUTS, INPUTS)
    x_RI = torch.randn(max(TRIED_ROWS), INPUTS, generator=draw)
    expected_RO = x_RI @ weight_OI.t()
    for kind, most in MOST_LOST.items():
        matrix = GgmlMatrix(rows_OB, form, INPUTS, exact=kind == "exact")
        for count in (1, *TRIED_ROWS):
            wanted_RO = expected_RO[:count]
            lost = float((matrix.multiply(x_RI[:count]) - wanted_RO).norm() / wanted_RO.norm())
            if not lost < most:
                return f"its {kind} products of {name} with {count} rows are wrong by {lost:.1g} of their size"
    return ""
