"""Another build of ggml than the wheel's: the owner chooses it by an environment variable, and it is tried before it is used.

`ggml_graph.py` has what the trial computes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from swarmnode.errors import LocalError

PACKAGE, OWN_BUILD = "xllamacpp", "SWARMNODE_GGML"
"""Package with a build of ggml, and the environment variable with the path of another one"""
TRIED = "_SWARMNODE_GGML_TRIED"
"""Environment variable of the process that tries a build"""
TRIAL, MAX_TOLD_CHARS = "swarmnode.compute.packing.ggml_graph", 200
LIBRARIES, TRIAL_S = ("ggml-base", "ggml-cpu", "ggml"), 120.0


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
        program = f"from {TRIAL} import try_build; try_build()"
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
