"""What a volunteer says of a node, as the options of `run` have it: checked, and made into its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.quantities import parse_bytes, parse_name, parse_rate, parse_share, parse_span
from swarmnode.cli.options.rules import RULE_NAMES, read_rules
from swarmnode.cli.terminal.console import default_home
from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.node.node import NodeConfig


def node_config(options: Mapping[str, Any]) -> NodeConfig:
    """The settings that options of `run` mean, by the names of its parameters. Raises UsageError, which names the wrong one."""
    from swarmnode.config import StageConfig
    from swarmnode.lending.card_guard import CardLimits
    from swarmnode.net.addressing.addresses import check_all
    from swarmnode.node.node import NodeConfig
    from swarmnode.plan.offline.plan_file import PlanFile
    from swarmnode.roles.host import HostConfig

    given = {name: value for name, value in options.items() if value}
    if "span" in given and "plan" in given:
        raise UsageError("--span and --plan both say which units to hold: leave one away")
    home = default_home(options["home"])
    return NodeConfig(
        host=HostConfig(
            home=home,
            name=parse_name(options["name"]),
            host_maddrs=check_all("--host-maddr", options["host_maddr"]),
            announce_maddrs=check_all("--announce-maddr", options["announce_maddr"], dialled=True),
            peers=check_all("--peer", options["peer"], needs_peer=True),
            nat_port_map=options["nat"],
            direct=options["direct"],
            lan=options["lan"],
            max_upload_bps=parse_rate(given["max_upload"], "--max-upload") if "max_upload" in given else None,
            max_download_bps=parse_rate(given["max_download"], "--max-download") if "max_download" in given else None,
            max_cache_bytes=parse_bytes(given["disk"], "--disk") if "disk" in given else None,
        ),
        stage=StageConfig(
            device=options["device"],
            dtype=options["dtype"],
            quantize=options["quantize"],
            memory_bytes=parse_bytes(given["memory"], "--memory") if "memory" in given else None,
            threads=given.get("threads"),
            compress=options["compress"],
            audit_share=parse_share(options["audit_share"], "--audit-share", zero=True),
            capture=options["capture"],
            throttle_units_per_s=given.get("throttle"),
            min_holders=options["min_holders"],
            share=parse_share(options["share"], "--cpu-share"),
        ).check(),
        span=parse_span(given["span"]) if "span" in given else None,
        plan=PlanFile.load(given["plan"]) if "plan" in given else None,
        card=CardLimits(given.get("max_gpu_temperature"), given.get("max_gpu_power")),
        rules=read_rules(home, options["rules"], {name: given[name] for name in RULE_NAMES if name in given}),
    )
