"""All attacks of this folder, one after another, each in a process of its own. Prints a table; exits with 1 where one succeeded.

    python contrib/attacks/run.py [--virtual] [--json] [NAME …]

`--virtual` runs those alone that need no process but their own, as the suite does.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
MACHINERY = {"attack.py", "run.py"}
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Script:
    """An attack as its file describes it, without running it."""

    path: Path
    does: str
    virtual: bool

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    attack: str
    happened: str
    held: bool
    seconds: float


def scripts() -> list[Script]:
    """All attacks, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.py")) if path.name not in MACHINERY]


def _read(path: Path) -> Script:
    tree = ast.parse(path.read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "VIRTUAL"
    }
    return Script(path, (ast.get_docstring(tree) or "").partition("\n")[0], values["VIRTUAL"])


def carry_out(script: Script) -> Result:
    """Run it. One that hangs or breaks was not withstood."""
    began_s = time.monotonic()
    try:
        done = subprocess.run([sys.executable, script.path], capture_output=True, text=True, timeout=TIMEOUT_S)
        lines = (done.stdout or done.stderr).strip().splitlines()
        held, happened = done.returncode == 0, lines[-1].partition(": ")[2] if lines else "it said nothing"
    except subprocess.TimeoutExpired:
        held, happened = False, f"no end within {TIMEOUT_S:.0f} s"
    return Result(script.name, script.does, happened, held, round(time.monotonic() - began_s, 1))


def show(results: list[Result]) -> None:
    table = Table("attack", "what happened", "held", "s")
    for result in results:
        table.add_row(
            f"[bold]{result.name}[/]\n{result.attack}",
            result.happened,
            "yes" if result.held else "[red]NO[/]",
            f"{result.seconds}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = scripts()
    unknown = set(options.names) - {script.name for script in found}
    if unknown:
        parser.error(f"no attack {', '.join(sorted(unknown))}; there are {', '.join(script.name for script in found)}")
    chosen = [script for script in found if not options.names or script.name in options.names]
    results = [carry_out(script) for script in chosen if script.virtual or not options.virtual]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        show(results)
    sys.exit(not all(result.held for result in results))


if __name__ == "__main__":
    main()
