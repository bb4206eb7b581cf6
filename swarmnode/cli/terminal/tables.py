"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text


def new_table(
    title: str | Text, columns: Collection[str], *, numbers: Collection[str] = (), caption: str | None = None
) -> Table:
    """A table without rows yet; the columns of `numbers` are set to the right."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def show(*tables: Table) -> None:
    """Print tables, as wide as the terminal."""
    console = Console()
    for table in tables:
        console.print(table)
