"""The rooms of the house: who may import whom, and which heavy packages only where they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swarmnode"
ROOMS = (
    {"errors", "config", "ledger", "metrics", "version"},
    {"codec"},
    {"compress"},
    {"net"},
    {"swarm"},
    {"plan"},
    {"compute"},
    {"platform", "roles"},
    {
        "bootstrap",
        "client",
        "demo",
        "localswarm",
        "node",
        "owner_client",
        "sync_client",
        "tokenizer",
        "training",
    },  # what wires the rooms together
    {"simulate"},
    {"cli"},
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
HEAVY = {"torch", "transformers", "hivemind", "bitsandbytes", "scipy", "numpy", "safetensors", "huggingface_hub"}
HIVEMIND_FILES = {"net/libp2p/from_hivemind.py"}
FORBIDDEN = {  # top-level package -> rooms that may not import it at all
    "torch": {"codec", "net", "swarm", "plan"},
    "transformers": {"codec", "compress", "net", "swarm", "plan"},
    "asyncio": {"codec", "compress", "plan"},
    "pickle": set(LEVEL),
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path, *, when_loaded: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; `when_loaded`: only those that importing the file runs."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if not (when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path: Path, names: Mapping[str, Path]) -> set[str]:
    """Modules of ours that a file imports outside its functions, under TYPE_CHECKING too."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    found = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return found & names.keys()


def rooms_imported(path: Path) -> set[str]:
    return {
        name.split(".")[1] for name in imports(path) if name.startswith("swarmnode.") and name.split(".")[1] in LEVEL
    }


def test_rooms_are_there() -> None:
    rooms = {room_of(path) for path in modules()}
    assert rooms == set(LEVEL), "each room has a place in ROOMS, and each place a room"


def test_no_files_import_one_another() -> None:
    """When they are loaded or for their types. What a function imports when it is called is not counted."""
    names = {dotted(path): path for path in PACKAGE.rglob("*.py")}
    imported = {name: modules_imported(path, names) for name, path in names.items()}
    order = TopologicalSorter(imported)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_name_stands_for_two_classes() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"the room {room} has no place in the house: add it to ROOMS"
    below = {other for other in rooms_imported(path) if LEVEL[other] > LEVEL[room]}
    assert not below, f"{name_of(path)} imports from rooms below it: {sorted(below)}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_plan_and_compute_do_not_know_one_another(path: Path) -> None:
    strangers = {"plan": "compute", "compute": "plan"}
    assert strangers.get(room_of(path)) not in rooms_imported(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_forbidden_packages(path: Path) -> None:
    packages = {name.split(".")[0] for name in imports(path)}
    for package, rooms in FORBIDDEN.items():
        assert package not in packages or room_of(path) not in rooms, f"{name_of(path)} imports {package}"
    if "hivemind" in packages:
        assert name_of(path) in HIVEMIND_FILES, f"{name_of(path)} imports hivemind; only {HIVEMIND_FILES} may"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=name_of)
def test_packages_import_nothing_heavy(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path, when_loaded=True)} & HEAVY


def test_the_command_line_starts_without_heavy_packages() -> None:
    listing = "import sys, swarmnode.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & HEAVY


def test_importing_the_package_loads_nothing_of_it() -> None:
    listing = "import sys, swarmnode; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {name for name in loaded if name.startswith("swarmnode.")}
    assert not loaded & HEAVY
