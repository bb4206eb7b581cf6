"""Command `swarmnode`: the tree of commands, and the entry point.

Nothing heavy is imported here: `swarmnode --help` must answer at once.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import typer

from swarmnode.cli.options.node_file import ConfiguredCommand
from swarmnode.terminal.commands import CommandPlace, GroupedHelp, LateCommands, places
from swarmnode.terminal.console import fail, leave_threads
from swarmnode.version import __version__

_OF_RUN = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}

GROUPS: Mapping[str, Mapping[str, CommandPlace]] = {
    "Use a swarm": {
        "join": CommandPlace("use.join"),
        "leave": CommandPlace("use.join"),
        **places("use", "models generate chat infer serve launch mcp status trace"),
        "adapter": CommandPlace("use.adapter", "app"),
    },
    "Lend this machine": {
        "run": CommandPlace("lend.run", settings={"cls": ConfiguredCommand}),
        **{name: CommandPlace("lend.lending") for name in ("ps", "pause", "resume", "finish", "reload", "stop")},
        **places("lend", "why credit doctor bench"),
        "config": CommandPlace("lend.config", settings=_OF_RUN),
        "service": CommandPlace("lend.service.commands", "app"),
        "weights": CommandPlace("lend.weights", "app"),
        "id": CommandPlace("lend.config", "show_identity"),
        "update": CommandPlace("lend.config"),
    },
    "Host a swarm": {
        "host": CommandPlace("host.host", settings={"cls": ConfiguredCommand}),
        **places("host", "create quantize bootstrap"),
        **{name: CommandPlace("host.members") for name in ("invite", "revoke", "members")},
    },
    "Train": places("train", "train tune export"),
    "Plan and try": places("plan", "fit network plan simulate demo"),
}
_HIDDEN = {"hidden": True}
OTHER_NAMES = {  # for hands that know other tools
    "list": CommandPlace("use.models", "models", _HIDDEN),
    "version": CommandPlace("lend.config", "version", _HIDDEN),
    "logs": CommandPlace("lend.service.commands", "logs_anywhere", _HIDDEN),
}


class Commands(GroupedHelp):
    """Group of all commands; the module of a command is imported when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LateCommands({**GROUPS, "": OTHER_NAMES})  # type: ignore[assignment]  # no command is added later


app = typer.Typer(
    name="swarmnode",
    help="Lend your GPU to a swarm that serves or trains large neural networks, or use one.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is three times faster than a decorated one
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarmnode {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    if platform.system() == "Windows":
        fail("swarmnode has no network daemon (p2pd) for Windows: run it in WSL 2 or in Docker", 2)


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the process was started without (`>&-`), before a socket gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def main() -> None:
    """Run the `swarmnode` command. The exit code is 0 for success, 1 for failure, 2 for wrong usage."""
    # torch reads this when it starts. Caches that grow and are freed leave gaps in a GPU's memory; segments of one size cannot
    # use them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _open_standard_streams()
    os.umask(os.umask(0) | 0o002)  # other users cannot write our files, whatever umask we were started with
    try:
        app()
    except SystemExit as ended:
        leave_threads(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


if __name__ == "__main__":
    main()
