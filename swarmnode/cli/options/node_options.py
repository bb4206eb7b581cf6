"""What a volunteer says of a node: the options of `run`, in the order of its help, and the settings that they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import of_same_names, option, settings
from swarmnode.cli.options.quantities import parse_bytes, parse_name, parse_rate, parse_share, parse_span
from swarmnode.cli.options.rules import RuleOptions, read_rules
from swarmnode.cli.terminal.console import home_option
from swarmnode.cli.terminal.durations import parse_duration
from swarmnode.config import COMPRESSIONS, StageConfig
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.node.node_config import NodeConfig
    from swarmnode.plan.offline.plan_file import PlanFile
    from swarmnode.plan.view import Span
    from swarmnode.roles.host_config import HostConfig


def _addresses(**bounds: bool) -> Callable[[Sequence[str], str], tuple[str, ...]]:
    def parse(texts: Sequence[str], flag: str) -> tuple[str, ...]:
        from swarmnode.net.addressing.addresses import check_all

        return check_all(flag, texts, **bounds)

    return parse


def _load_plan(path: Path, _flag: str) -> PlanFile:
    from swarmnode.plan.offline.plan_file import PlanFile

    return PlanFile.load(path)


addresses_option = partial(option, (), metavar="MADDR", parse=_addresses())
disk_option = partial(option, None, "--disk", metavar="SIZE", parse=parse_bytes)


@dataclass(frozen=True)
class NodeOptions:
    """A node as its volunteer describes it. Options that have the name of a field of its settings are that field."""

    device: str = option("auto", help="auto, cpu, cuda, cuda:1, mps.")
    dtype: str = option("auto", help="auto, float32, bfloat16, float16.")
    quantize: str = option("none", metavar="none|int8|nf4", help="Quantise the weights at load.")
    capture: str = option(
        "auto", metavar="auto|off", help="On a card, replay steps of decoding as CUDA graphs where that works."
    )
    memory_bytes: int | None = option(
        None,
        "--memory",
        metavar="SIZE",
        parse=parse_bytes,
        help="Memory to lend, as 6GB or 512MiB; default: what is free.",
    )
    max_cache_bytes: int | None = disk_option(
        help="Disk space for fetched weights of all swarms, and for training states of others; default: most of what is free."
    )
    min_holders: int = option(
        2,
        metavar="N",
        min=1,
        max=16,
        help="In training, have states of units that fewer nodes hold kept on other peers' disks, too; 1: of none.",
    )
    max_upload_bps: float | None = option(
        None,
        "--max-upload",
        metavar="RATE",
        parse=parse_rate,
        help="Send no faster than this, as in 8Mbit; default: as fast as it goes.",
    )
    max_download_bps: float | None = option(
        None, "--max-download", metavar="RATE", parse=parse_rate, help="The same of what comes from peers."
    )
    share: float = option(
        1.0,
        "--cpu-share",
        "--gpu-share",
        text="100%",
        metavar="SHARE",
        parse=parse_share,
        help="Compute for so much of the time only, as 50%.",
    )
    nice: int = option(0, min=0, max=19, help="Let other programs go first: the more, the higher, up to 19.")
    rules: RuleOptions = settings(RuleOptions)
    max_celsius: float | None = option(
        None,
        "--max-gpu-temperature",
        typed=float,
        metavar="°C",
        min=30,
        max=110,
        help="Rest more where a card is hotter.",
    )
    max_watts: float | None = option(
        None,
        "--max-gpu-power",
        typed=float,
        metavar="WATTS",
        min=1,
        max=10_000,
        help="Rest more where a card draws more.",
    )
    life_s: float | None = option(
        None, "--max-age", metavar="12h", parse=parse_duration, help="Leave in order after so long."
    )
    idle_disk: bool = option(False, "--idle-disk", help="Let other programs go first at the disk (ionice idle).")
    compress: str = option(
        "auto",
        metavar="|".join(COMPRESSIONS),
        help="In training, what is sent to other stages, if train does not say: auto takes no more than a slow link needs.",
    )
    audit_share: float = option(
        0.03,
        text="3%",
        metavar="SHARE",
        parse=partial(parse_share, zero=True),
        help="In training, compute so much of what others computed once more, to find who is false; 0%: nothing.",
    )
    span: Span | None = option(
        None, metavar="A:B", parse=parse_span, help="Hold units A to B-1; default: what the swarm needs most."
    )
    plan: PlanFile | None = option(
        None,
        typed=Path,
        metavar="PLAN.json",
        parse=_load_plan,
        help="In training, begin where plan --model --json put this node, and stay while the plan's other peers are at their "
        "places.",
    )
    host_maddrs: tuple[str, ...] = addresses_option("--host-maddr", help="Where to listen. Repeatable.")
    announce_maddrs: tuple[str, ...] = addresses_option(
        "--announce-maddr",
        parse=_addresses(dialled=True),
        help="Address under which others reach this peer. Repeatable.",
    )
    peers: tuple[str, ...] = addresses_option(
        "--peer",
        parse=_addresses(needs_peer=True),
        help="A peer of the swarm to join through, beside the invite's. Repeatable.",
    )
    home: Path = home_option()
    name: str = option("", parse=parse_name, help="Name shown to others.")
    threads: int | None = option(
        None, text=0, min=0, max=4096, help="CPU threads to compute with; default: torch's choice."
    )
    throttle_units_per_s: float | None = option(
        None,
        "--throttle",
        text=0.0,
        metavar="UNITS_PER_S",
        min=0.0,
        max=1e9,
        hidden=True,
        help="Compute as a device of this speed would.",
    )
    nat_port_map: bool = option(False, "--nat/--no-nat", help="Ask the router to map a port (UPnP).")
    direct: bool = option(True, "--direct/--no-direct", help="Connect to other peers by plain TCP, too, sealed.")
    lan: bool = option(False, "--lan/--no-lan", help="Find peers on the local network and be found (mDNS).")

    @property
    def host(self) -> HostConfig:
        """How the node is present."""
        from swarmnode.roles.host_config import HostConfig

        return of_same_names(HostConfig, self)

    @property
    def stage(self) -> StageConfig:
        """What the node lends. Raises UsageError for a device, a format or a share that there is not."""
        return of_same_names(StageConfig, self).check()

    def config(self) -> NodeConfig:
        """Return the node's settings. Raises UsageError, which names the option that is wrong."""
        from swarmnode.lending.card_guard import CardLimits
        from swarmnode.node.node_config import NodeConfig

        if self.span is not None and self.plan is not None:
            raise UsageError("--span and --plan both say which units to hold: leave one away")
        card, rules = of_same_names(CardLimits, self), read_rules(self.home, self.rules)
        return of_same_names(NodeConfig, self, card=card, rules=rules)
