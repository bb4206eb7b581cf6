"""Record what a benchmark prints, and write the pages of figures from the records.

    python contrib/docs/figures.py record serving -- python contrib/benchmarks/serving.py --repeats 7
    python contrib/docs/figures.py

The first line runs the command and keeps its JSON in `contrib/benchmarks/figures/serving.json`, with the machine, its load, the
date and the commit. The second one writes the tables of docs/evidence.md (between `<!-- figures: NAME -->` and `<!-- end -->`) and
the table of docs/performance.md. The cells of the latter are cells of the records.

A record has one machine and one date; rows of records by hand may have a date each, in the column `date`. If a record has
`labels`, a map from a figure's path in the JSON to its row's name and floor, recording keeps the map and the figures that it
names, and no others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "contrib" / "benchmarks" / "figures"
EVIDENCE = ROOT / "docs" / "evidence.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
EXPECTATIONS = FIGURES / "expectations.json"
DATE = "date"  # column of records by hand whose rows are of different days: the day on which the row's figure first stood in docs
BEGIN, END = "<!-- figures: {} -->", "<!-- end -->"
SECTION = re.compile(rf"{BEGIN.format('([a-z_]+)')}\n.*?{END}", re.DOTALL)


def evidence() -> str:
    """Return docs/evidence.md with the table of each record, and its machine, date, commit and command above it."""

    def section(match: re.Match[str]) -> str:
        record = read(match[1])
        when = "dates of rows" if DATE in record["columns"] else f"{record['date']} · commit {record['commit']}"
        told = f"`{record['command']}` · {record['machine']} · {when}"
        lines = [BEGIN.format(match[1]), told, "", *table(record["columns"], record["rows"]), END]
        return "\n".join(lines)

    return SECTION.sub(section, EVIDENCE.read_text())


def performance() -> str:
    """Return docs/performance.md with the newest figures. Raises KeyError if a cell that it shows is in no record."""
    rows = []
    for subject, sentence, *sources in json.loads(EXPECTATIONS.read_text()):
        cells = [cell(read(name), row, column) for name, row, column in sources]
        dates = [f"{name}, {date_of(read(name), row)}" for name, row, _ in sources]
        rows.append([subject, "; ".join(cells), sentence, "; ".join(dates)])
    written = "\n".join([BEGIN.format("expectations"), *table(["", "measured", "in words", "record, date"], rows), END])
    return SECTION.sub(lambda _: written, PERFORMANCE.read_text())


def cell(record: dict[str, Any], row: str, column: str) -> str:
    """Return the cell of `column` in the row that has a cell `row`. Raises KeyError if another number of rows than one has it."""
    found = [cells for cells in record["rows"] if row in cells]
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows of {record['command']} have a cell {row!r}")
    return str(found[0][record["columns"].index(column)])


def date_of(record: dict[str, Any], row: str) -> str:
    """Return the day of the row that has a cell `row`: the record's, unless its rows have dates of their own."""
    return cell(record, row, DATE) if DATE in record["columns"] else str(record["date"])


def read(name: str) -> dict[str, Any]:
    """Return a record: machine, date, commit, command, and a table as `columns` and `rows`."""
    return dict(json.loads((FIGURES / f"{name}.json").read_text()))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (columns, ["---"] * len(columns), *rows)]


def record(name: str, command: Sequence[str]) -> None:
    """Run a benchmark and keep its figures. Raises ValueError if it printed no JSON, or not a figure that has a label."""
    path = FIGURES / f"{name}.json"
    labels: dict[str, list[str]] = read(name).get("labels", {}) if path.exists() else {}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    printed = {place: figure for result in results(done.stdout) for place, figure in flat(result)}
    if not printed:
        raise ValueError(f"{shlex.join(command)} printed no JSON")
    if lacking := labels.keys() - printed.keys():
        raise ValueError(f"{shlex.join(command)} printed no {', '.join(sorted(lacking))}")
    rows = [[*labels[place], printed[place]] for place in labels] or [[place, "", printed[place]] for place in printed]
    kept = {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}",
        "date": str(datetime.now(timezone.utc).date()),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python" if word == sys.executable else word for word in command]),
        "recorded": "by this script",
        "columns": ["", "floor", "measured"],
        "rows": rows,
        **({"labels": labels} if labels else {}),
    }
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


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
