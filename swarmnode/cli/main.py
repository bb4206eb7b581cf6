"""`swarmnode`: the commands, and how a failure looks to a person.

Nothing heavy is imported here: `swarmnode --help` must answer at once.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable

import typer

from swarmnode.cli.host.bootstrap import bootstrap
from swarmnode.cli.host.create import create
from swarmnode.cli.host.host import host
from swarmnode.cli.host.invite import invite
from swarmnode.cli.host.members import members
from swarmnode.cli.host.revoke import revoke
from swarmnode.cli.lend.bench import bench
from swarmnode.cli.lend.config import config
from swarmnode.cli.lend.credit import credit
from swarmnode.cli.lend.doctor import doctor
from swarmnode.cli.lend.identity import show_identity
from swarmnode.cli.lend.lending import finish, pause, resume, stop
from swarmnode.cli.lend.ps import ps
from swarmnode.cli.lend.run import run
from swarmnode.cli.lend.service.commands import app as service
from swarmnode.cli.lend.weights import app as weights
from swarmnode.cli.lend.why import why
from swarmnode.cli.options.node_file import ConfiguredCommand
from swarmnode.cli.plan.demo import demo
from swarmnode.cli.plan.fit import fit
from swarmnode.cli.plan.network import network
from swarmnode.cli.plan.plan import plan
from swarmnode.cli.plan.simulate import simulate
from swarmnode.cli.terminal.console import fail
from swarmnode.cli.terminal.grouped_help import GroupedHelp
from swarmnode.cli.train.export import export
from swarmnode.cli.train.train import train
from swarmnode.cli.use.chat import chat
from swarmnode.cli.use.generate import generate
from swarmnode.cli.use.infer import infer
from swarmnode.cli.use.join import join
from swarmnode.cli.use.launch import launch
from swarmnode.cli.use.mcp import mcp
from swarmnode.cli.use.models import models
from swarmnode.cli.use.serve import serve
from swarmnode.cli.use.status import status
from swarmnode.cli.use.trace import trace
from swarmnode.version import __version__

GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Use a swarm": (join, models, generate, chat, infer, serve, launch, mcp, status, trace),
    "Lend this machine": (run, ps, pause, resume, finish, stop, why, credit, doctor, bench),
    "Host a swarm": (host, create, bootstrap, invite, revoke, members),
    "Train": (train, export),
    "Plan and try": (fit, network, plan, simulate, demo),
}

app = typer.Typer(
    name="swarmnode",
    help="Lend your GPU to a swarm that serves or trains large neural networks, or use one.",
    cls=GroupedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is three times faster than a decorated one
    context_settings={"help_option_names": ["-h", "--help"]},
)
for heading, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=heading, cls=ConfiguredCommand if command is run else None)(command)
app.command(
    rich_help_panel="Lend this machine", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(config)
app.add_typer(service, name="service", rich_help_panel="Lend this machine")
app.add_typer(weights, name="weights", rich_help_panel="Lend this machine")
app.command("id", rich_help_panel="Lend this machine")(show_identity)


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
        fail("there is no network daemon (p2pd) for Windows: run swarmnode in WSL 2 or in Docker", 2)


def _open_standard_streams() -> None:
    """Who was started without one of them (`>&-`) has one that leads nowhere, before a socket gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def main() -> None:
    """Entry point of the `swarmnode` command. Exit codes: 0 done, 1 failed, 2 wrong usage."""
    # Read when torch starts: caches that grow and go leave holes in a card's memory, which segments of one size cannot use.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _open_standard_streams()
    app()


if __name__ == "__main__":
    main()
