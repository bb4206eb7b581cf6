"""The rooms of the house: who may import whom, and which heavy packages only where they are needed."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swarmnode"
ROOMS = (  # in their order: a room imports from those before it, and from itself
    *("counting", "version", "errors", "files", "config", "decisions", "hollow_package", "metrics", "ledger"),
    *("codec", "tolerances", "compress", "net", "links", "swarm", "plan", "data", "compute", "lending", "platform"),
    *("membership", "peer", "weights", "founding", "measuring", "serving", "credit", "audits", "graph_serving"),
    *("tuning", "checkpoints", "training"),
    *("localswarm", "client", "node", "examination", "demo", "simulate", "programs", "terminal", "gateway", "cli"),
)
LEVEL = {room: level for level, room in enumerate(ROOMS)}
COMPUTE = (
    "",
    "packing",
    "model",
    "gguf",
    "serving",
    "training",
    "graph",
    "capacity",
)  # the rooms within `compute`; "": its own files
CONVENTIONAL = {"__init__.py", "server.py", "client.py", "messages.py"}
MAX_ROOM_LINES = 8000  # of each of the inner rooms of `compute`, too
MAX_FILES_A_FOLDER = 15
MAX_FILES = 425  # 405 and a twentieth
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70  # of code, without docstring, comments and blank lines
HEAVY = {"torch", "transformers", "hivemind", "bitsandbytes", "scipy", "numpy", "safetensors", "huggingface_hub"}
HEAVY |= {"fastapi", "uvicorn", "pydantic"}  # the gateway's
HIVEMIND_FILES = {"net/libp2p/from_hivemind.py"}
FORBIDDEN = {  # top-level package -> rooms that may not import it at all
    "torch": {"codec", "net", "links", "swarm", "plan"},
    "transformers": {"codec", "compress", "net", "links", "swarm", "plan"},
    "asyncio": {"codec", "compress", "plan"},
    "pickle": set(LEVEL),
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Of a statement, where imports may stand; expressions have none."""
    for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, blocks, ())


@functools.cache
def imports(path: Path, *, when_loaded: bool = False) -> frozenset[str]:
    """Dotted names that a file imports; `when_loaded`: only those that importing the file runs."""
    pending: list[ast.AST] = [parsed(path)]
    found: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if not (when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending += inner_statements(node)
    return frozenset(found)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path: Path, names: Mapping[str, Path]) -> set[str]:
    """Modules of ours that a file imports: when it is loaded, for its types, and inside its functions."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & names.keys()


def rooms_imported(path: Path) -> set[str]:
    return {
        name.split(".")[1] for name in imports(path) if name.startswith("swarmnode.") and name.split(".")[1] in LEVEL
    }


def packages_imported(path: Path, *, when_loaded: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(path, when_loaded=when_loaded)}


def test_rooms_are_there() -> None:
    rooms = {room_of(path) for path in modules()}
    assert rooms == set(LEVEL), "each room has a place in ROOMS, and each place a room"


def test_no_files_import_one_another() -> None:
    names = {dotted(path): path for path in PACKAGE.rglob("*.py")}
    imported = {name: modules_imported(path, names) for name, path in names.items()}
    order = TopologicalSorter(imported)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_rooms_within_compute_are_ordered() -> None:
    names = {dotted(path): path for path in modules()}
    below = []
    for path in (path for path in modules() if room_of(path) == "compute"):
        others = {inner_room(name) for name in modules_imported(path, names) if name.startswith("swarmnode.compute.")}
        own = COMPUTE.index(inner_room(dotted(path)))
        below += [f"{name_of(path)}: {other}" for other in others if COMPUTE.index(other) > own]
    assert below == []


def inner_room(name: str) -> str:
    """Return the room within `compute` that a module of it is in; "" for the files of `compute` itself."""
    inner = name.split(".")[2:]
    return inner[0] if len(inner) > 1 else ""


def test_rooms_and_folders_can_be_overlooked() -> None:
    sizes: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for path in modules():
        inner = f"/{inner_room(dotted(path))}" if room_of(path) == "compute" else ""
        sizes[room_of(path) + inner] += len(path.read_text().splitlines())
        folders[name_of(path.parent)] += path.name != "__init__.py"
    assert {room: lines for room, lines in sizes.items() if lines > MAX_ROOM_LINES} == {}
    assert {folder: files for folder, files in folders.items() if files > MAX_FILES_A_FOLDER} == {}
    assert folders.total() <= MAX_FILES


def test_files_and_functions_can_be_overlooked() -> None:
    long = {name_of(path): len(path.read_text().splitlines()) for path in modules()}
    for path in modules():
        code = [bool(line.strip()) and not line.lstrip().startswith("#") for line in path.read_text().splitlines()]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                begins = node.body[ast.get_docstring(node) is not None and len(node.body) > 1].lineno
                lines = sum(code[begins - 1 : node.end_lineno])
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name_of(path)} {node.name}"] = MAX_FILE_LINES + lines
    assert {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES} == {}


def test_no_two_files_share_a_name() -> None:
    """But for commands, which are named as people type them, and for names that say what every room has."""
    shared = Counter(path.name for path in modules() if room_of(path) != "cli")
    assert {name for name, files in shared.items() if files > 1} <= CONVENTIONAL


def test_no_name_stands_for_two_classes() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_a_room_imports_only_from_rooms_above_it() -> None:
    below = {
        name_of(path): rooms
        for path in modules()
        if (rooms := {other for other in rooms_imported(path) if LEVEL[other] > LEVEL[room_of(path)]})
    }
    assert below == {}


def test_plan_and_compute_do_not_know_one_another() -> None:
    strangers = {"plan": "compute", "compute": "plan"}
    assert [name_of(path) for path in modules() if strangers.get(room_of(path)) in rooms_imported(path)] == []


def test_packages_are_imported_only_where_they_may_be() -> None:
    found = {name_of(path): packages_imported(path) for path in modules()}
    assert {file for file, packages in found.items() if "hivemind" in packages} <= HIVEMIND_FILES
    for package, rooms in FORBIDDEN.items():
        assert [name_of(path) for path in modules() if room_of(path) in rooms and package in found[name_of(path)]] == []


def test_packages_import_nothing_heavy() -> None:
    heavy = {name_of(path): packages_imported(path, when_loaded=True) & HEAVY for path in PACKAGE.rglob("__init__.py")}
    assert {file: packages for file, packages in heavy.items() if packages} == {}


def test_the_command_line_starts_without_heavy_packages() -> None:
    every = "[*typer.main.get_command(swarmnode.cli.main.app).commands.values()]"
    listing = f"import sys, typer, swarmnode.cli.main; {every}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & HEAVY


def test_a_command_is_imported_without_the_others() -> None:
    listing = "import sys; from swarmnode.cli.main import app; app(['ps', '--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("swarmnode.cli.")}
    assert "swarmnode.cli.lend.lending" in loaded
    assert not loaded & {"swarmnode.cli.lend.run", "swarmnode.cli.use.generate", "swarmnode.cli.host.create"}


def test_importing_the_package_loads_nothing_of_it() -> None:
    listing = "import sys, swarmnode; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {name for name in loaded if name.startswith("swarmnode.")}
    assert not loaded & HEAVY


def test_a_peer_is_imported_without_its_real_network() -> None:
    """In virtual time nobody needs libp2p."""
    listing = "import sys, swarmnode.peer.host; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"hivemind", "swarmnode.net.libp2p.engine"} & set(done.stdout.split())


def test_a_client_starts_without_torch() -> None:
    """It computes nothing, and torch takes longer to import than all else that joining and asking take."""
    listing = "import sys, swarmnode.client.swarm_client, swarmnode.net.libp2p.engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & (HEAVY - {"hivemind", "numpy"})


def test_every_public_definition_says_what_it_is() -> None:
    """What a method of the same name in an abstract class or a protocol says need not be said again, nor what a class of another
    package calls."""
    classes = {node.name: node for path in modules() for node in parsed(path).body if isinstance(node, ast.ClassDef)}
    told = {
        method.name for node in classes.values() if is_abstract(node) for method in methods(node) if documented(method)
    }
    mute = []
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                inherited = told | said_above(node, classes)
                mute += [f"{name_of(path)}: {node.name}"] * (not documented(node))
                mute += [
                    f"{name_of(path)}: {node.name}.{method.name}"
                    for method in methods(node)
                    if not documented(method) and method.name not in inherited and not has_foreign_base(node, classes)
                ]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                mute += [f"{name_of(path)}: {node.name}"] * (not documented(node))
    assert mute == []


def documented(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public ones; a setter is as its property."""
    found = [method for method in node.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [method for method in found if not method.name.startswith("_")]
    whole = [method for method in public if ast.unparse(method.body[-1]) != "..."]  # else their class tells of them
    return [method for method in whole if not any("setter" in ast.unparse(one) for one in method.decorator_list)]


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def is_abstract(node: ast.ClassDef) -> bool:
    return not {"ABC", "Protocol"}.isdisjoint(bases(node)) or "raise NotImplementedError" in ast.unparse(node)


def said_above(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Names of methods that a class inherits with their docstrings."""
    above = [classes[base] for base in bases(node) if base in classes]
    own = {method.name for one in above for method in methods(one) if documented(method)}
    return own.union(*(said_above(one, classes) for one in above))


def has_foreign_base(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether it is called by another package, whose words its methods are."""
    return any(
        base not in classes and base not in {"ABC", "Protocol", "Generic", "IntEnum", "Enum"} for base in bases(node)
    )


def test_what_windows_has_not_is_imported_elsewhere_alone() -> None:
    """Its modules can be imported there: `mypy --platform win32`, which takes longer, says the rest."""
    posix = {"fcntl", "grp", "pwd", "resource", "termios", "uvloop"}
    found = {
        f"{name_of(path)}: {alias.name}"
        for path in modules()
        for node in parsed(path).body
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in posix
    }
    assert not found
