"""A picture of a swarm for people and scripts: its peers and their spans."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from swarmnode.codec.tensors import Codec
from swarmnode.net.addressing.addresses import host_of, is_relayed
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import state_name
from swarmnode.plan.spans.placement import gaps
from swarmnode.plan.view import view_of
from swarmnode.swarm.peers.shards import PEERS_PER_SHARD
from swarmnode.swarm.peers.standing import Standing
from swarmnode.swarm.records.announcement import Announcement, State, peer_digest
from swarmnode.swarm.records.manifest import TRAIN, Manifest
from swarmnode.swarm.storage.swarmfile import Swarm

CODEC_NAMES = {int(codec): codec.name.lower() for codec in Codec}
GOOD, DOUBTED, SHUNNED = "good", "doubted", "shunned"


def picture_of(swarm: Swarm, peers: Mapping[PeerId, Announcement], standing: Standing) -> dict[str, Any]:
    """Return the picture as `swarmnode status --json` prints it. `standing` is this peer's findings about the others.

    "bootstraps" lists peers without a span, "missing" the layers without a ready holder, "ungiven" those of a serving swarm
    whose weights no peer gives to new machines.
    """
    assert swarm.manifest is not None
    units = swarm.manifest.model.units
    ready = [peer for peer in view_of(units, peers.values()).peers if peer.state is State.READY]
    missing = gaps(units, ready)
    digests = {peer_digest(peer): peer for peer in peers}
    machines = machines_of(peers)
    shunned, doubted = standing.shunned, standing.doubted
    return {
        "swarm": swarm.id.hex(),
        "name": swarm.name,
        "mode": swarm.manifest.mode,
        "task": swarm.manifest.task,
        "model": swarm.manifest.model.hub_id or swarm.manifest.model.family,
        "adapters": list(swarm.manifest.adapter_names),
        "units": units,
        "weights_bytes": swarm.manifest.total_bytes,
        "covered": not missing,
        "missing": missing,
        "ungiven": _ungiven(swarm.manifest, peers.values()),
        "training_step": max((peer.training_step for peer in peers.values()), default=0),
        "peers": [
            {
                "peer": peer.peer,
                "name": peer.name,
                "span": list(peer.span),
                "state": state_name(peer.life),
                "device": peer.device,
                "number_format": peer.number_format,
                "memory_bytes": peer.memory_bytes,
                "since": peer.started_at,
                "sessions": peer.sessions,
                "cache_tokens_free": peer.cache_tokens_free,
                "draft_model": peer.draft_model,
                "decode_units_per_s": peer.decode_units_per_s,
                "training_units_per_s": peer.training_units_per_s,
                "training_step": peer.training_step,
                "up_bps": peer.up_bps,
                "down_bps": peer.down_bps,
                "reached": peer.reach.name.lower(),
                "sends": {
                    digests[digest]: CODEC_NAMES.get(codec, str(codec))
                    for digest, codec in peer.sends.items()
                    if digest in digests
                },
                "machine": machines[peer.peer],
                "standing": SHUNNED if peer.peer in shunned else DOUBTED if peer.peer in doubted else GOOD,
                "trust": standing.trust(peer.peer),
            }
            for peer in sorted(peers.values(), key=lambda peer: (peer.span, peer.name, peer.peer))
            if peer.span[1] > 0
        ],
        "bootstraps": sorted(peer.peer for peer in peers.values() if peer.span[1] == 0),
        "addresses": {peer.peer: list(peer.addresses) for peer in peers.values()},
    }


def _ungiven(manifest: Manifest, peers: Collection[Announcement]) -> list[int]:
    """Return the layers whose weights no peer gives; none of a swarm that trains, or of a model that is on the hub.

    Without peers they may be unknown yet, and those of a large swarm are a sample: then it returns none, too.
    """
    is_known = 0 < len(peers) < PEERS_PER_SHARD
    if manifest.mode == TRAIN or manifest.model.hub_id is not None or not is_known:
        return []
    given = {unit for peer in peers if peer.life is not State.OFFLINE for unit in range(*peer.seeds)}
    return [unit for unit in range(manifest.model.units) if unit not in given]


def machines_of(peers: Mapping[PeerId, Announcement]) -> dict[PeerId, PeerId]:
    """Return for each peer the first peer, by id, on the same machine. Peers are on one machine if they have the same addresses,
    ports aside; a peer that others reach over relays only has a machine of its own."""
    first: dict[frozenset[str], PeerId] = {}
    found = {}
    for peer in sorted(peers):
        hosts = _hosts(peers[peer].addresses)
        found[peer] = first.setdefault(hosts, peer) if hosts else peer
    return found


@lru_cache(maxsize=4096)
def _hosts(addresses: tuple[str, ...]) -> frozenset[str]:
    return frozenset(host for each in addresses if not is_relayed(each) and (host := host_of(each)) is not None)
