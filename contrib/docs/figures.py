"""Record what a benchmark prints, and write the pages of figures from the records.

    python contrib/docs/figures.py record serving -- python contrib/benchmarks/serving.py --repeats 7
    python contrib/docs/figures.py

The first line runs the command and keeps its JSON in `contrib/benchmarks/figures/serving.json`, with the machine, its load, the
date and the commit. The second one writes the tables of docs/evidence.md (between `<!-- figures: NAME -->` and `<!-- end -->`) and
the table of docs/performance.md. The cells of the latter are cells of the records.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "contrib" / "benchmarks" / "figures"
EVIDENCE = ROOT / "docs" / "evidence.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
EXPECTATIONS = FIGURES / "expectations.json"
BEGIN, END = "<!-- figures: {} -->", "<!-- end -->"
SECTION = re.compile(rf"{BEGIN.format('([a-z_]+)')}\n.*?{END}", re.DOTALL)


def evidence() -> str:
    """Return docs/evidence.md with the table of each record, and its machine, date, commit and command above it."""

    def section(match: re.Match[str]) -> str:
        record = read(match[1])
        told = f"`{record['command']}` · {record['machine']} · {record['date']} · commit {record['commit']}"
        lines = [BEGIN.format(match[1]), told, "", *table(record["columns"], record["rows"]), END]
        return "\n".join(lines)

    return SECTION.sub(section, EVIDENCE.read_text())


def performance() -> str:
    """Return docs/performance.md with the newest figures. Raises KeyError if a cell that it shows is in no record."""
    rows = []
    for subject, name, row, column, sentence in json.loads(EXPECTATIONS.read_text()):
        record = read(name)
        found = [cells for cells in record["rows"] if row in cells]
        if len(found) != 1:
            raise KeyError(f"{len(found)} rows of {name} have a cell {row!r}")
        rows.append([subject, found[0][record["columns"].index(column)], sentence, f"{name}, {record['date']}"])
    written = "\n".join([BEGIN.format("expectations"), *table(["", "measured", "in words", "record, date"], rows), END])
    return SECTION.sub(lambda _: written, PERFORMANCE.read_text())


def read(name: str) -> dict[str, Any]:
    """Return a record: machine, date, commit, command, and a table as `columns` and `rows`."""
    return dict(json.loads((FIGURES / f"{name}.json").read_text()))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (columns, ["---"] * len(columns), *rows)]


def record(name: str, command: Sequence[str]) -> None:
    """Run a benchmark and keep what it printed. Raises ValueError if that ends with no JSON."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    rows = [[path, "", figure] for result in results(done.stdout) for path, figure in flat(result)]
    if not rows:
        raise ValueError(f"{shlex.join(command)} printed no JSON")
    kept = {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}",
        "date": str(datetime.now(timezone.utc).date()),
        "commit": commit.stdout.strip(),
        "command": shlex.join(command),
        "recorded": "by this script",
        "columns": ["", "floor", "measured"],
        "rows": rows,
    }
    (FIGURES / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def results(printed: str) -> Iterator[Any]:
    """Yield each JSON object of what a program printed, one to a line or spread over several; other lines are passed over."""
    decoder = json.JSONDecoder()
    at = 0
    while (at := printed.find("{", at)) >= 0:
        try:
            result, at = decoder.raw_decode(printed, at)
        except ValueError:
            at += 1
        else:
            yield result


def flat(result: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each number or word of a result."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield from flat(value, f"{path} {key}".strip())
    elif isinstance(result, list) and any(isinstance(value, dict | list) for value in result):
        for index, value in enumerate(result):
            yield from flat(value, f"{path} {index}".strip())
    else:
        values = result if isinstance(result, list) else [result]
        yield path, ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)


def processor() -> str:
    """Return the name of this machine's processor."""
    told = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", told.read_text()) if told.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Run a benchmark and record it, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["record"])
    parser.add_argument("name", nargs="?")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    if options.what == "record":
        if not options.name or not options.command:
            parser.error("record needs a name and a command: figures.py record NAME -- COMMAND…")
        record(options.name, options.command)
    EVIDENCE.write_text(evidence())
    PERFORMANCE.write_text(performance())


if __name__ == "__main__":
    main()
