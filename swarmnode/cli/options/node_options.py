"""What a volunteer says of a node: the options of `run`, in the order of its help, and the settings that they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import of_same_names, option, path_option, settings
from swarmnode.cli.options.quantities import parse_bytes, parse_name, parse_rate, parse_share, parse_span
from swarmnode.cli.options.rules import RuleOptions, read_rules
from swarmnode.cli.terminal.console import home_option
from swarmnode.cli.terminal.formatting import parse_duration
from swarmnode.config import COMPRESSIONS, StageConfig
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.peer.host_config import HostConfig
    from swarmnode.plan.offline.plan_file import PlanFile
    from swarmnode.plan.view import Span


def _addresses(**bounds: bool) -> Callable[[Sequence[str], str], tuple[str, ...]]:
    def parse(texts: Sequence[str], flag: str) -> tuple[str, ...]:
        from swarmnode.net.addressing.addresses import check_all

        return check_all(flag, texts, **bounds)

    return parse


def _load_plan(path: Path, _flag: str) -> PlanFile:
    from swarmnode.plan.offline.plan_file import PlanFile

    return PlanFile.load(path)


rate_option = partial(option, None, metavar="RATE", parse=parse_rate)
addresses_option = partial(option, [], metavar="MADDR", parse=_addresses())
size_option = partial(option, None, metavar="SIZE", parse=parse_bytes)


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node. A field that HostConfig, StageConfig, CardLimits or NodeConfig has, too, becomes that field."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps.")
    dtype: str = option("auto", "auto, float32, bfloat16, float16.")
    quantize: str = option("none", "Quantise the weights at load.", metavar="none|int8|nf4")
    capture: str = option(
        "auto", "On a card, replay steps of decoding as CUDA graphs where that works.", metavar="auto|off"
    )
    memory_bytes: int | None = size_option("Memory to lend, as 6GB or 512MiB; default: what is free.", "--memory")
    max_cache_bytes: int | None = size_option(
        "Disk space for fetched weights of all swarms, and for training states of others; default: most of what is free.",
        "--disk",
    )
    min_holders: int = option(
        2,
        "In training, have states of units that fewer nodes hold kept on other peers' disks, too; 1: of none.",
        metavar="N",
        min=1,
        max=16,
    )
    max_upload_bps: float | None = rate_option(
        "Send no faster than this, as in 8Mbit; default: as fast as it goes.", "--max-upload"
    )
    max_download_bps: float | None = rate_option("The same of what comes from peers.", "--max-download")
    share: float = option(
        "100%",
        "Compute for so much of the time only, as 50%.",
        "--cpu-share",
        "--gpu-share",
        metavar="SHARE",
        parse=parse_share,
    )
    nice: int = option(0, "Let other programs go first: the more, the higher, up to 19.", min=0, max=19)
    rules: RuleOptions = settings(RuleOptions)
    max_celsius: float | None = option(
        None, "Rest more where a card is hotter.", "--max-gpu-temperature", typed=float, metavar="°C", min=30, max=110
    )
    max_watts: float | None = option(
        None, "Rest more where a card draws more.", "--max-gpu-power", typed=float, metavar="WATTS", min=1, max=10_000
    )
    life_s: float | None = option(
        None, "Leave in order after so long.", "--max-age", metavar="12h", parse=parse_duration
    )
    idle_disk: bool = option(False, "Let other programs go first at the disk (ionice idle).")
    compress: str = option(
        "auto",
        "In training, what is sent to other stages, if train does not say: auto takes no more than a slow link needs.",
        metavar="|".join(COMPRESSIONS),
    )
    audit_share: float = option(
        "3%",
        "In training, compute so much of what others computed once more, to find who is false; 0%: nothing.",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
    )
    span: Span | None = option(
        None, "Hold units A to B-1; default: what the swarm needs most.", metavar="A:B", parse=parse_span
    )
    plan: PlanFile | None = path_option(
        "In training, begin where plan --model --json put this node, and stay while the plan's other peers are at their "
        "places.",
        metavar="PLAN.json",
        parse=_load_plan,
    )
    host_maddrs: tuple[str, ...] = addresses_option("Where to listen. Repeatable.", "--host-maddr")
    announce_maddrs: tuple[str, ...] = addresses_option(
        "Address under which others reach this peer. Repeatable.", "--announce-maddr", parse=_addresses(dialled=True)
    )
    peers: tuple[str, ...] = addresses_option(
        "A peer of the swarm to join through, beside the invite's. Repeatable.",
        "--peer",
        parse=_addresses(needs_peer=True),
    )
    home: Path = home_option()
    name: str = option("", "Name shown to others.", parse=parse_name)
    threads: int | None = option(
        None, "CPU threads to compute with; default: torch's choice.", text=0, min=0, max=4096, show_default=True
    )
    throttle_units_per_s: float | None = option(
        None,
        "Compute as a device of this speed would.",
        "--throttle",
        text=0.0,
        metavar="UNITS_PER_S",
        min=0.0,
        max=1e9,
        hidden=True,
    )
    nat_port_map: bool = option(False, "Ask the router to map a port (UPnP).", "--nat/--no-nat")
    direct: bool = option(True, "Connect to other peers by plain TCP, too, sealed.", "--direct/--no-direct")
    lan: bool = option(False, "Find peers on the local network and be found (mDNS).", "--lan/--no-lan")

    @property
    def host(self) -> HostConfig:
        """Presence of the node on its network."""
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
            raise UsageError("--span and --plan both say which units to hold: leave one away")
        card, rules = of_same_names(CardLimits, self), read_rules(self.home, self.rules)
        return of_same_names(NodeConfig, self, card=card, rules=rules)
