"""Texts and figures that describe a node to its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swarmnode.lending.cards import energy_used
from swarmnode.lending.lending import DAYS
from swarmnode.measuring.service_report import Donation, work_sums
from swarmnode.metrics.metric import Readings
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host import Host
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.storage.swarmfile import Swarm

if TYPE_CHECKING:
    from swarmnode.measuring.hardware import Hardware

Tell = Callable[..., None]
"""Callback for news of a node's life: `(event, text for people, **details for scripts)`"""


def described(
    swarm: Swarm,
    config: NodeConfig,
    host: Host | None,
    span: Span | None,
    donation: Donation | None,
    readings: Readings,
) -> dict[str, Any]:
    """Return the node's description for its control socket. `host` is None until it has joined, `span` until it has chosen,
    `donation` in the first minute."""
    own = None if host is None else host.directory.own
    return {
        "swarm": swarm.name,
        "swarm_id": swarm.id.hex(),
        "name": config.host.name if host is None else host.name,
        "peer": None if host is None else host.peer_id,
        "span": None if span is None else list(span),
        "sessions": 0 if own is None else own.sessions,
        "device": config.stage.device if own is None else own.device,
        "lends": lent(config),
        "energy": None if (energy := energy_used(config.host.home)) is None else energy._asdict(),
        "given": None if donation is None else donation.to_json(),
        **work_sums(readings),
    }


def measured(hardware: Hardware | None, own: Announcement | None) -> dict[str, Any]:
    """Return the memory, its room and the speed of a node for its owner. `hardware` is None until the devices are known, `own`
    until the node announces itself.

    `room` and `advice` are those of the hardware.
    `memory` has for each device its name, whether it is a card, and the bytes in use, lent, and in
    total. `speed` has the
    positions (samples) of one session that pass through the span in a second, when decoding and in training; 0 if that was not
    measured.
    """
    lent = () if hardware is None else hardware.lent
    held = 0 if own is None else own.span[1] - own.span[0]
    speeds = (0.0, 0.0) if own is None else (own.decode_units_per_s, own.training_units_per_s)
    return {
        "room": None if hardware is None else hardware.room,
        "advice": "" if hardware is None else hardware.advice,
        "memory": [
            {
                "device": each.device.name,
                "is_card": not each.device.shared,
                "used_bytes": each.ledger.used_bytes,
                "lent_bytes": each.ledger.limit_bytes,
                "total_bytes": each.device.total_bytes,
            }
            for each in {id(each.ledger): each for each in lent}.values()
        ],
        "speed": dict(zip(("decode", "training"), (speed / held if held else 0.0 for speed in speeds), strict=True)),
    }


def lent(config: NodeConfig) -> dict[str, Any]:
    """Return the limits and rules under which a volunteer lends, by name. Limits that are not set are left out."""
    host, stage, rules = config.host, config.stage, config.rules
    limits = {
        "memory_bytes": stage.memory_bytes,
        "disk_bytes": host.max_cache_bytes,
        "max_upload_bps": host.max_upload_bps,
        "max_download_bps": host.max_download_bps,
        "share": stage.share if stage.share < 1 else None,
        "max_celsius": config.card.max_celsius,
        "max_watts": config.card.max_watts,
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
