"""Help in groups: a command stands under the heading of its `rich_help_panel`, in plain text, which is three times faster than a
decorated one."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from swarmnode.cli.terminal.usage_errors import in_one_line


class GroupedHelp(TyperGroup):
    """Lists commands under their headings, both in the order in which they were added."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Options before the command's name are read here."""
        with in_one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """And those after it here."""
        with in_one_line():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading."""
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(heading, []).append((name, command))
        widest = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        room = formatter.width - 6 - widest
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(room)) for name, command in rows])
