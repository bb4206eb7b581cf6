"""Command `swarmnode`: the table of all commands, and the entry point.

Nothing heavy is imported here: `swarmnode --help` must answer at once.
"""

from __future__ import annotations

import os
import platform
import sys

import typer

from swarmnode.cli.options.node_file import ConfiguredCommand
from swarmnode.terminal.commands import HELP, CommandPlace, CommandTable, CommandTree
from swarmnode.terminal.console import fail, leave_threads
from swarmnode.terminal.progress import spinner
from swarmnode.version import __version__

_OF_RUN = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
_LENDING = {name: CommandPlace("lend.lending") for name in ("ps", "pause", "resume", "stop")}

TABLE = CommandTable(
    groups={
        "use": {
            "join": CommandPlace("use.join"),
            "chat": CommandPlace("use.chat", shown="system max-new-tokens temperature top-p adapter json"),
            "generate": CommandPlace(
                "use.generate",
                shown="max-new-tokens temperature top-p top-k seed json-schema grammar adapter trust json",
            ),
            "infer": CommandPlace("use.generate"),
            "serve": CommandPlace("use.serve", shown="port host keys new-key context cors mcp json"),
            "status": CommandPlace("use.status"),
            "models": CommandPlace("use.models"),
            "models weights": CommandPlace("use.models", "list_weights"),
            "models prune": CommandPlace("use.models"),
            "adapter": CommandPlace(about="Add LoRA adapters to a swarm, and list and remove them."),
            "adapter list": CommandPlace("use.adapter", "list_adapters"),
            **{f"adapter {name}": CommandPlace("use.adapter") for name in ("add", "remove", "block", "unblock")},
            "leave": CommandPlace("use.join"),
        },
        "lend": {
            "run": CommandPlace(
                "lend.run",
                shown="memory disk device cpu-share max-upload only-idle hours exclusive page name",
                settings={"cls": ConfiguredCommand},
            ),
            **_LENDING,
            "doctor": CommandPlace("lend.doctor"),
            "why": CommandPlace("lend.why"),
            "why trace": CommandPlace("lend.why"),
            "why credit": CommandPlace("lend.why"),
            "why receipt": CommandPlace("use.verify", "verify"),
            "config": CommandPlace("lend.lending", settings=_OF_RUN),
            "config reload": CommandPlace("lend.lending"),
            "config tool": CommandPlace("use.serve", "configure_tool"),
            "service": CommandPlace(about="Run a node in the background."),
            "service install": CommandPlace("lend.services", settings=_OF_RUN),
            **{f"service {name}": CommandPlace("lend.services") for name in ("status", "logs", "uninstall")},
        },
        "owner": {
            "host": CommandPlace(
                "host.host",
                shown="name mode config memory disk max-upload hours only-idle public door-only",
                settings={"cls": ConfiguredCommand},
            ),
            "create": CommandPlace(
                "host.create", shown="model mode config module listen announce public ask-password force json"
            ),
            "invite": CommandPlace("host.members", shown="peer role expires uses note qr json"),
            "revoke": CommandPlace("host.members"),
            "members": CommandPlace("host.members"),
            "quantize": CommandPlace("host.create"),
        },
        "train": {
            "train": CommandPlace(
                "train.train", shown="data steps epochs batch sequence optimizer lr warmup eval-data log"
            ),
            "tune": CommandPlace("train.tune", shown="data steps epochs method rank batch sequence lr eval-data out"),
            "export": CommandPlace("train.train"),
        },
        "plan": {
            "fit": CommandPlace("plan.fit"),
            "plan": CommandPlace(
                "plan.plan", shown="model stages replicas holders activation-gb gradient-gb gpu seconds report json"
            ),
            "plan simulate": CommandPlace(
                "plan.simulate", shown="model workload churn hours peers gpu arrivals plan report json"
            ),
            "demo": CommandPlace("plan.demo"),
        },
    },
    first=["host", "join", "run", "chat", "serve", "status", "ps", "pause", "resume", "leave", "doctor"],
    renamed={
        "finish": "pause --after-work",
        "reload": "config reload",
        "bootstrap": "host --door-only",
        "network": "status --export",
        "bench": "fit --measure",
        "id": "doctor --id",
        "update": "doctor --update",
        "credit": "why credit",
        "trace": "why trace",
        "launch": "config tool",
        "mcp": "serve --mcp",
        "weights list": "models weights",
        "weights prune": "models prune",
        "weights": "models weights",
        "simulate": "plan simulate",
    },
    synonyms={  # for hands that know other tools, and a receipt's own word
        "list": "models",
        "logs": "service logs",
        "verify": "why receipt",
        "version": "--version",
    },
    advice={
        "ls show": "`swarmnode models` lists the models, `swarmnode ps` what runs here",
        "rm remove delete": "`swarmnode leave NAME` forgets a swarm, `swarmnode models prune` removes its weights",
        "pull download": "`swarmnode host ORGANISATION/MODEL` fetches a model and hosts it",
        "start up lend": "`swarmnode run` lends this machine, `swarmnode host MODEL` shares a model",
        "kill exit quit down": "`swarmnode stop` ends a node; Ctrl-C does so in its terminal",
        "upgrade": "`swarmnode doctor --update` prints the command",
        "uninstall": "`swarmnode service uninstall NAME` removes a service, `pip uninstall swarmnode-p2p` the program (with "
        "`pipx` or `uv tool` in place of `pip` if that installed it)",
    },
    topics={  # NAME@COMMAND: of that command only
        "Model": "model mode config@create config@host seed@create seed@host module task plain products equal-bits "
        "byte-level units bottleneck stage-layers anchor sample adapter adapters quantize kv dtype capture draft-model "
        "weights span",
        "This machine": "memory disk expert-disk device threads cpu-share nice idle-disk max-upload max-download "
        "max-gpu-temperature max-gpu-power",
        "When to lend": "rules only-idle max-load exclusive hours days on-mains max-pressure monthly month-day unmetered "
        "max-gpu-memory max-gpu-load notify max-age",
        "Text": "system ids receipt max-new-tokens temperature top-p top-k min-p frequency-penalty presence-penalty "
        "repetition-penalty logit-bias json-schema grammar logprobs seed@chat seed@generate drafts context",
        "Members": "private public open uses expires role group note qr peer@invite priority owner-key password-file "
        "ask-password trust keys new-key",
        "Page and API": "page serve port host no-page cors mcp",
        "Network": "listen announce door-only bootstrap host-maddr announce-maddr peer nat direct lan compress patience",
        "Data": "data epochs loss pack show end-answers eval-data eval-share eval-every eval-patience",
        "Adapter": "method rank alpha rslora targets prompt-tokens window codec share trainers join",
        "Steps": "steps batch microbatch sequence optimizer lr schedule warmup final-share decay-steps clip weight-decay "
        "momentum beta1 beta2 epsilon seed autocast checkpoint-steps recipe print-recipe freeze label-smoothing z-loss "
        "router-balance router-z-loss ema",
        "Several machines in training": "average-every average-codec average-keep average-rank average-alternating "
        "average-by-line outer-lr outer-momentum topk-ratio topk-feedback robust audit-share tune-share min-holders plan@run",
        "Plan": "stages replicas holders activation-gb gradient-gb microbatches gpu seconds workload churn hours@simulate "
        "seed@plan seed@simulate peers arrivals clients prompt tokens rebalance plan",
        "In this process": "local out state",
        "Files and logs": "config name home force quiet json report log tensorboard metrics-port metrics-host log-format "
        "verbose",
    },
)


class Commands(CommandTree):
    """The commands in TABLE; the module of a command is imported when it is used."""

    table = TABLE


app = typer.Typer(
    name="swarmnode",
    help="Run and train large neural networks on the computers of several people.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is three times faster than a decorated one
    context_settings={"help_option_names": [*HELP]},
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
    quiet = "--json" in sys.argv or not sys.stdout.isatty()
    try:
        with spinner("Starting", quiet=quiet, until_output=True):
            app()
    except SystemExit as ended:
        leave_threads(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


if __name__ == "__main__":
    main()
