"""The flags for rules; `rules.py` says what they mean."""

from __future__ import annotations

from typing import Any

import typer


def _rule(flag: str, metavar: str, help_text: str) -> Any:
    return typer.Option("", flag, metavar=metavar, help=help_text, show_default=False)


RULES = typer.Option(
    None,
    "--rules",
    metavar="FILE",
    help="Rules for when to lend; default: rules.toml in the home folder.",
    show_default=False,
)
ONLY_IDLE = _rule("--only-idle", "10m", "Lend only while nobody has touched keyboard or mouse for so long.")
MAX_LOAD = _rule("--max-load", "25%", "Pause while other programs use more of the CPUs.")
EXCLUSIVE = typer.Option([], "--exclusive", metavar="PROGRAM", help="Pause while this program runs. Repeatable.")
HOURS = _rule("--hours", "22:00-07:00", "Lend at these hours only.")
DAYS = _rule("--days", "mon-fri", "Lend on these days only.")
ON_MAINS = typer.Option(False, "--on-mains", help="Pause on battery.")
MAX_PRESSURE = _rule("--max-pressure", "10%", "Pause while other programs wait for memory for more of the time.")
MONTHLY = _rule("--monthly", "500GB", "Pause for the rest of a month in which so much was sent and received.")
MONTH_DAY = _rule("--month-day", "15", "The day on which that month begins; default: the first.")
UNMETERED = typer.Option(
    False, "--unmetered", help="Pause where the connection is paid by what it carries (NetworkManager)."
)
MAX_GPU_MEMORY = _rule("--max-gpu-memory", "2GB", "Pause while other programs use more of a card's memory.")
MAX_GPU_LOAD = _rule("--max-gpu-load", "25%", "Pause while other programs use more of a card's time.")
