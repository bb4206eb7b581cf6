"""Run all attacks of this folder, one after another, each in its own process, and print a table.

python contrib/attacks/run.py [--fast] [--json] [NAME …]

`--fast` runs only the attacks that the test suite runs: a second or two each, in virtual time. An attack is `known` if it
succeeds and `docs/security.md` says so. The exit status is 1 if an attack succeeded that is not known.
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
from rich.markup import escape
from rich.table import Table

FOLDER = Path(__file__).parent
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Script:
    """Attack as its file describes it, without running it."""

    path: Path
    does: str
    fast: bool

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Result:
    """Result of one attack: a row of the table."""

    name: str
    attack: str
    happened: str
    verdict: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether the attack succeeded and is not known."""
        return self.verdict not in ("held", "known")


def scripts() -> list[Script]:
    """Return all attacks, sorted by name: the files that assign `FAST`."""
    return [script for path in sorted(FOLDER.glob("*.py")) if (script := _read(path)) is not None]


def _read(path: Path) -> Script | None:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            said = dict(zip((each.id for each in node.targets[0].elts), ast.literal_eval(node.value), strict=True))
            return Script(path, (ast.get_docstring(tree) or "").partition("\n")[0], said["FAST"])
    return None


def carry_out(script: Script) -> Result:
    """Run `script` and return its result. An attack that hangs or crashes counts as "NOT HELD"."""
    began_s = time.monotonic()
    try:
        done = subprocess.run([sys.executable, script.path], capture_output=True, text=True, timeout=TIMEOUT_S)
        lines = (done.stdout or done.stderr).strip().splitlines()
        said, _, happened = lines[-1].partition(": ") if lines else ("", "", "it said nothing")
        verdict = said if done.returncode == 0 else "NOT HELD"
    except subprocess.TimeoutExpired:
        verdict, happened = "NOT HELD", f"no end within {TIMEOUT_S:.0f} s"
    return Result(script.name, script.does, happened, verdict, round(time.monotonic() - began_s, 1))


def show(results: list[Result]) -> None:
    table = Table("attack", "what happened", "", "s")
    for result in results:
        table.add_row(
            f"[bold]{result.name}[/]\n{escape(result.attack)}",
            escape(result.happened),
            f"[red]{result.verdict}[/]" if result.succeeded else result.verdict,
            f"{result.seconds}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only these attacks")
    parser.add_argument("--fast", action="store_true", help="run only the attacks that the test suite runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = scripts()
    unknown = set(options.names) - {script.name for script in found}
    if unknown:
        parser.error(f"no attack {', '.join(sorted(unknown))}; there are {', '.join(script.name for script in found)}")
    chosen = [script for script in found if not options.names or script.name in options.names]
    results = [carry_out(script) for script in chosen if script.fast or not options.fast]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        show(results)
    sys.exit(any(result.succeeded for result in results))


if __name__ == "__main__":
    main()
