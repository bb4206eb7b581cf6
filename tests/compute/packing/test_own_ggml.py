"""Another build of ggml: what cannot be used is refused in a sentence, also if it would end the process."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swarmnode.compute.packing import ggml
from swarmnode.errors import LocalError

COMPILER = shutil.which("cc") or shutil.which("gcc")


def wheel() -> Path:
    spec = importlib.util.find_spec(ggml.PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob(f"{ggml.PACKAGE}*.so"))


def compiled(path: Path, source: str, *more: str) -> None:
    """Write a shared library."""
    assert COMPILER
    (path.parent / "source.c").write_text(source)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, path.parent / "source.c", *more], check=True, timeout=60)


def chosen(monkeypatch: pytest.MonkeyPatch, path: Path | str) -> str:
    """Return which build is used if the owner chooses this one, or the error."""
    monkeypatch.setenv(ggml.OWN_BUILD, str(path))
    monkeypatch.setattr(ggml, "_load", ggml._load.__wrapped__)
    monkeypatch.setattr(ggml, "library", ggml.library.__wrapped__)
    try:
        return ggml.build()
    except LocalError as error:
        assert f"{ggml.OWN_BUILD}={path} cannot be used" in str(error) and "or unset" in str(error)
        return str(error)


@pytest.mark.skipif(ggml.library() is None, reason="the package xllamacpp is not installed, or not for this machine")
def test_a_build_that_multiplies_rightly_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, wheel()) == f"ggml of {ggml.OWN_BUILD}={wheel()}"


@pytest.mark.parametrize("what", ["nothing", "folder", "text", "other"])
def test_what_is_no_build_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libggml-cpu.so"
    if what == "text":
        path.write_text("no library")
    elif what == "folder":
        path.mkdir()
    said = {
        "nothing": "there is no library libggml-cpu",
        "folder": "there is no library libggml-cpu",
        "text": "invalid ELF header|too short|not a mach-o|not valid",
        "other": "it has no function ggml_init",
    }[what]
    library: Path | str = path
    if what == "other":
        library = next(iter(Path("/usr/lib").glob("**/libm.so.6")), "")
    if not library:
        pytest.skip("this machine has no such library")
    assert re.search(said, found := chosen(monkeypatch, library)), found


FAULTS = {
    "aborts": ("#include <stdlib.h>\nvoid *ggml_init(void) { abort(); }", "ended a process that tried it .SIGABRT"),
    "size": ("long ggml_type_size(int kind) { return 7; }", "its format 0 is not F32 with blocks of 4 bytes"),
    "layout": ("long ggml_tensor_overhead(void) { return 400; }", "its tensors have another size"),
    "values": (
        "#include <string.h>\nvoid dequantize_row_q4_K(void *x, float *y, long n) { memset(y, 0, n * 4); }",
        "its exact products of Q4_K with",
    ),
    "norm": (
        "void *ggml_rms_norm(void *context, void *x, float epsilon) { return x; }",
        "its norm gives other numbers",
    ),
    "sinks": ("void ggml_flash_attn_ext_add_sinks(void *x, void *sinks) {}", "its attention gives other numbers"),
    "rope": ("#include <stdlib.h>\nvoid *ggml_rope_ext(void) { abort(); }", "ended a process that tried it .SIGABRT"),
}


@pytest.mark.skipif(
    ggml.library() is None or COMPILER is None,
    reason="xllamacpp is not installed, or no compiler for a build beside it",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_of_another_kind_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with one other function, and for all the rest the wheel's."""
    source, said = FAULTS[fault]
    compiled(tmp_path / "libggml.so", source, "-Wl,--no-as-needed", str(wheel()), f"-Wl,-rpath,{wheel().parent}")
    assert re.search(said, found := chosen(monkeypatch, tmp_path)), found
