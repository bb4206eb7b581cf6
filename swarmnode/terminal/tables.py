"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode.terminal.console import make_room
from swarmnode.terminal.formatting import one_line, printable


class PlainTable(Table):
    """Table whose texts are shown literally, because they may be strangers' names; they are no markup."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row; each text becomes one line."""
        super().add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def new_table(
    title: str | Text,
    columns: Collection[str],
    *,
    numbers: Collection[str] = (),
    caption: str | None = None,
    plain: bool = False,
) -> Table:
    """Return a table without rows. The columns in `numbers` are aligned to the right. A `plain` one has no frame and more room for
    cells. No cell is cut: what is too long goes on in the next line, since a command may take it."""
    title = Text(one_line(title), "table.title") if isinstance(title, str) else title
    below = None if caption is None else Text(printable(caption), "table.caption")
    table = PlainTable(title=title, title_justify="left", caption=below, caption_justify="left")
    for column in columns:
        table.add_column(Text(printable(column)), justify="right" if column in numbers else "left", overflow="fold")
    if plain:
        table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
        table.min_width = title.cell_len  # the title is as wide as the table
    return table


def prevent_wrapping(table: Table, *columns: str) -> None:
    """Keep the cells of these columns on one line each, however narrow the terminal is."""
    for column in table.columns:
        if str(column.header) in columns:
            column.no_wrap = True


def show(*tables: Table) -> None:
    """Print tables, as wide as the terminal."""
    make_room(again=False)
    console = Console()
    for table in tables:
        console.print(table)
