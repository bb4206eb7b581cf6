"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.terminal.formatting import one_line, printable


class PlainTable(Table):
    """Table whose texts are shown literally, because they may be strangers' names; they are no markup."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row; each text becomes one line."""
        super().add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def new_table(
    title: str | Text, columns: Collection[str], *, numbers: Collection[str] = (), caption: str | None = None
) -> Table:
    """Return a table without rows. The columns in `numbers` are aligned to the right."""
    title = Text(one_line(title), "table.title") if isinstance(title, str) else title
    below = None if caption is None else Text(printable(caption), "table.caption")
    table = PlainTable(title=title, title_justify="left", caption=below, caption_justify="left")
    for column in columns:
        table.add_column(Text(printable(column)), justify="right" if column in numbers else "left")
    return table


def show(*tables: Table) -> None:
    """Print tables, as wide as the terminal."""
    console = Console()
    for table in tables:
        console.print(table)
