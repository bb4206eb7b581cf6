"""Options of `run`, in the order of its help, and the settings of a node that follow from them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.quantities import parse_name, parse_share, parse_span
from swarmnode.cli.options.rules import RuleOptions, read_rules
from swarmnode.config import ADAPTERS, COMPRESSIONS, KV_FORMS, MEMBERS_TOO, StageConfig, parse_bytes, parse_rate
from swarmnode.errors import UsageError
from swarmnode.terminal.console import home_option
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import of_same_names, one_of, option, path_option, settings

if TYPE_CHECKING:
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.peer.host_config import HostConfig
    from swarmnode.plan.offline.planner_files import PlanFile
    from swarmnode.plan.view import Span


def _addresses(**bounds: bool) -> Callable[[Sequence[str], str], tuple[str, ...]]:
    def parse(texts: Sequence[str], flag: str) -> tuple[str, ...]:
        from swarmnode.net.addressing.addresses import check_all

        return check_all(flag, texts, **bounds)

    return parse


def _load_plan(path: Path, _flag: str) -> PlanFile:
    from swarmnode.plan.offline.planner_files import PlanFile

    return PlanFile.load(path)


def _weights(text: str, flag: str) -> tuple[Path, ...]:
    """Return the files and folders to copy weights from. Raises UsageError if `text` is none that can be read, and not auto."""
    if text == "auto":
        from swarmnode.weights.sources import model_caches

        return model_caches()
    try:
        path = Path(text).expanduser().resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{flag} {text}: {getattr(error, 'strerror', None) or error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(f"{flag} {text}: neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{flag} {text}: this user cannot read it")
    return (path,)


rate_option = partial(option, None, metavar="RATE", parse=parse_rate)
addresses_option = partial(option, [], metavar="MADDR", parse=_addresses())
size_option = partial(option, None, metavar="SIZE", parse=parse_bytes)


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node. Each field is also a field of HostConfig, StageConfig, CardLimits or NodeConfig if one of them has that
    name."""

    device: str = option("auto", "Where to compute: auto, cpu, cuda, cuda:1 or mps.")
    dtype: str = option("auto", "Number format: auto, float32, bfloat16 or float16.")
    quantize: str = option("none", "Quantise the weights while loading them.", metavar="none|int8|nf4")
    products: str = option(
        "auto",
        "Products of a GGUF file's packed weights: fast ones round activations to 8 bits on a CPU and to --dtype on a GPU, exact "
        "ones compute in float32, and plain unpacks the weights in memory. auto: exact with --dtype float32, else fast.",
        metavar="auto|exact|fast|plain",
    )
    kv: str = option(
        "plain",
        "Keep the KV caches of sessions as computed, or in 8 bits: about twice as many sessions fit.",
        metavar="|".join(KV_FORMS),
    )
    capture: str = option(
        "auto", "Replay decoding steps if possible: as CUDA graphs, or on a CPU as flat programs.", metavar="auto|off"
    )
    draft_model: str = option(
        "",
        "Guess tokens with this small model while others compute, for clients with --drafts auto: a folder, a GGUF file or a hub "
        "id. Its vocabulary must be that of the swarm's model. own: with the prediction layer (MTP) of the swarm's model, at "
        "the node with the last layer. An EAGLE head guesses there, too.",
        metavar="PATH|HUB_ID|own",
    )
    memory_bytes: int | None = size_option("Memory to lend, as 6GB; default: the free memory.", "--memory")
    max_cache_bytes: int | None = size_option(
        "Disk space to lend; default: most of the free space.",
        "--disk",
    )
    weights: tuple[Path, ...] | None = option(
        None,
        "Copy the weights from this file or folder where they are right; auto: from the caches of Ollama, LM Studio, llama.cpp "
        "and the Hugging Face hub. Others can see which weights your node does not fetch.",
        metavar="PATH|auto",
        parse=_weights,
    )
    adapters: str = option(
        MEMBERS_TOO,
        "Adapters that texts may use here: those of members, too; those that the swarm was founded with; or none.",
        metavar="|".join(ADAPTERS),
        parse=one_of(ADAPTERS),
    )
    min_holders: int = option(
        2,
        "In training: back up layers held by fewer than N machines on other machines' disks; 1 turns this off.",
        metavar="N",
        min=1,
        max=16,
    )
    max_upload_bps: float | None = rate_option("Send no faster than this, as 8Mbit.", "--max-upload")
    max_download_bps: float | None = rate_option("Receive no faster than this, as 8Mbit.", "--max-download")
    share: float = option(
        "100%",
        "Compute only for this share of the time, as 50%.",
        "--cpu-share",
        "--gpu-share",
        metavar="SHARE",
        parse=parse_share,
    )
    nice: int = option(0, "Let other programs go first; 19 yields the most.", min=0, max=19)
    rules: RuleOptions = settings(RuleOptions)
    notify: bool = option(True, "Show on the desktop when a rule pauses or resumes the node.", "--notify/--no-notify")
    max_celsius: float | None = option(
        None,
        "Compute less while a GPU is hotter than this.",
        "--max-gpu-temperature",
        typed=float,
        metavar="°C",
        min=30,
        max=110,
    )
    max_watts: float | None = option(
        None,
        "Compute less while a GPU draws more than this.",
        "--max-gpu-power",
        typed=float,
        metavar="WATTS",
        min=1,
        max=10_000,
    )
    life_s: float | None = option(
        None, "Leave the swarm after this time, as Ctrl-C does.", "--max-age", metavar="12h", parse=parse_duration
    )
    idle_disk: bool = option(False, "Let other programs use the disk first (ionice idle).")
    compress: str = option(
        "auto",
        "In training, unless `train` chooses: how data to other machines is encoded; auto compresses on slow links.",
        metavar="|".join(COMPRESSIONS),
    )
    audit_share: float = option(
        "3%",
        "In training: recompute this share of others' work to catch wrong results; 0% turns this off.",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
    )
    tune_share: float | None = option(
        None,
        "Tune adapters of others for this share of the time while texts are served; default: 30% in private swarms, else 0%.",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
    )
    span: Span | None = option(
        None,
        "Hold layers A to B-1 (0: a language model's embedding); default: what the swarm needs most.",
        metavar="A:B",
        parse=parse_span,
    )
    plan: PlanFile | None = path_option(
        "In training: start with the layers that `plan --model --json` gave this machine, and keep them while the others "
        "keep theirs.",
        metavar="PLAN.json",
        parse=_load_plan,
    )
    host_maddrs: tuple[str, ...] = addresses_option("Listen at this address. Repeatable.", "--host-maddr")
    announce_maddrs: tuple[str, ...] = addresses_option(
        "Address at which others reach this machine. Repeatable.", "--announce-maddr", parse=_addresses(dialled=True)
    )
    peers: tuple[str, ...] = addresses_option(
        "Join through this machine of the swarm, too. Repeatable.",
        "--peer",
        parse=_addresses(needs_peer=True),
    )
    home: Path = home_option()
    name: str = option("", "Name that others see; default: the one given to `swarmnode join`.", parse=parse_name)
    threads: int | None = option(
        None, "CPU threads for computing; default: torch's choice.", text=0, min=0, max=4096, show_default=True
    )
    throttle_units_per_s: float | None = option(
        None,
        "Compute only as fast as a device of this speed.",
        "--throttle",
        text=0.0,
        metavar="UNITS_PER_S",
        min=0.0,
        max=1e9,
        hidden=True,
    )
    nat_port_map: bool = option(False, "Ask the router to open a port (UPnP).", "--nat/--no-nat")
    direct: bool = option(True, "Connect to other machines by encrypted TCP as well.", "--direct/--no-direct")
    lan: bool = option(False, "Find machines on the local network (mDNS).", "--lan/--no-lan")

    @property
    def host(self) -> HostConfig:
        """Return the options of the node's network connections as settings."""
        from swarmnode.peer.host_config import HostConfig

        return of_same_names(HostConfig, self)

    @property
    def stage(self) -> StageConfig:
        """Settings of the stage, checked. Raises UsageError if a device, a format or the share is not valid."""
        return of_same_names(StageConfig, self).check()

    def config(self) -> NodeConfig:
        """Return the node's settings. Raises UsageError, which names the option that is wrong."""
        from swarmnode.lending.cards import CardLimits
        from swarmnode.node.node_config import NodeConfig

        if self.span is not None and self.plan is not None:
            raise UsageError("--span and --plan both choose the layers to hold: leave one out")
        card, rules = of_same_names(CardLimits, self), read_rules(self.home, self.rules)
        return of_same_names(NodeConfig, self, card=card, rules=rules)
