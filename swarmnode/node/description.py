"""What a node says of itself to its owner: what it is, what it lends and when, and what it has given."""

from __future__ import annotations

from typing import Any

from swarmnode.config import StageConfig
from swarmnode.lending.energy import energy_used
from swarmnode.lending.rules import DAYS, Rules
from swarmnode.metrics.metric import Readings
from swarmnode.node.node_config import NodeConfig
from swarmnode.plan.view import Span
from swarmnode.roles.host import Host
from swarmnode.roles.host_config import HostConfig
from swarmnode.roles.measuring.service_report import given
from swarmnode.swarm.storage.swarmfile import Swarm


def described(
    swarm: Swarm, config: NodeConfig, host: Host | None, span: Span | None, readings: Readings
) -> dict[str, Any]:
    """As its control socket tells it; `host` is None before it has joined, `span` before it has chosen."""
    own = None if host is None else host.directory.own
    return {
        "swarm": swarm.name,
        "swarm_id": swarm.id.hex(),
        "name": config.host.name,
        "peer": None if host is None else host.peer_id,
        "span": None if span is None else list(span),
        "sessions": 0 if own is None else own.sessions,
        "device": config.stage.device if own is None else own.device,
        "lends": lent(config.host, config.stage, config.rules),
        "energy": None if (energy := energy_used(config.host.home)) is None else energy._asdict(),
        **given(readings),
    }


def lent(host: HostConfig, stage: StageConfig, rules: Rules) -> dict[str, Any]:
    """What a volunteer lends, and when: what has no limit is not in it."""
    limits = {
        "memory_bytes": stage.memory_bytes,
        "disk_bytes": host.max_cache_bytes,
        "max_upload_bps": host.max_upload_bps,
        "max_download_bps": host.max_download_bps,
        "share": stage.share if stage.share < 1 else None,
    }
    when = {
        "only_idle_s": rules.only_idle_s,
        "max_load": rules.max_others_load,
        "exclusive": sorted(rules.exclusive) or None,
        "hours": str(rules.hours) if rules.hours else None,
        "days": [DAYS[day] for day in sorted(rules.days)] or None,
        "on_mains": rules.on_mains or None,
        "max_pressure": rules.max_memory_pressure,
        "monthly_bytes": rules.monthly_bytes,
        "unmetered": rules.unmetered or None,
        "max_gpu_memory_bytes": rules.max_others_gpu_bytes,
        "max_gpu_load": rules.max_others_gpu_load,
    }
    return {name: limit for name, limit in {**limits, **when}.items() if limit is not None}
