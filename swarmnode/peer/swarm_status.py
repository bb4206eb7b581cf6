"""Status of a swarm for people and scripts, as `swarmnode status` and the page show it: its peers and their spans.

Explanations for `swarmnode why`: current facts about a peer, a unit or a session, and the decisions that concern it. Their
sentences are for volunteers: they speak of layers, machines, texts and tokens/s.

Network of a live swarm for planning and simulation: its machines and links as announced, with gaps filled in and marked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, permutations
from typing import Any

import numpy as np

from swarmnode.codec.tensors import Codec
from swarmnode.counting import counted, layers
from swarmnode.decisions import Decision, names_unit
from swarmnode.errors import ERROR_TEXT, ErrorCode, LocalError
from swarmnode.net.addressing.addresses import host_of, is_relayed
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.host import Host, state_name
from swarmnode.plan.findings import PeerAction
from swarmnode.plan.offline.planner_files import MAX_DEVICES
from swarmnode.plan.routes.delays import bandwidths, one_way_delays
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.spans.span_placement import gaps
from swarmnode.plan.view import Span, view_of
from swarmnode.swarm.peers.shards import PEERS_PER_SHARD
from swarmnode.swarm.records.announcement import Announcement, State, peer_digest
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.storage.swarmfile import Swarm

CODEC_NAMES = {int(codec): codec.name.lower() for codec in Codec}


def picture_of(swarm: Swarm, peers: Mapping[PeerId, Announcement], standing: Findings) -> dict[str, Any]:
    """Return the picture as `swarmnode status --json` prints it. `standing` is this peer's findings about the others.

    "bootstraps" lists peers without a span, "missing" the layers without a ready holder, "ungiven" those of a serving swarm
    whose weights no peer gives to new machines.
    """
    assert swarm.manifest is not None
    units = swarm.manifest.model.units
    ready = [peer for peer in view_of(units, peers.values()).peers if peer.state is State.READY]
    missing = gaps(units, ready)
    digests = {peer_digest(peer): peer for peer in peers}
    # None of a swarm that trains, or of a model that is on the hub. Without peers they may be unknown yet, and the peers of a
    # large swarm are a sample: then none, too.
    ungiven: list[int] = []
    if swarm.manifest.mode != TRAIN and swarm.manifest.model.hub_id is None and 0 < len(peers) < PEERS_PER_SHARD:
        given = {unit for peer in peers.values() if peer.life is not State.OFFLINE for unit in range(*peer.seeds)}
        ungiven = [unit for unit in range(units) if unit not in given]
    # For each peer the first peer, by id, on the same machine: with the same addresses, ports aside. A peer that others reach
    # over relays only has a machine of its own.
    first: dict[frozenset[str], PeerId] = {}
    machines = {}
    for name in sorted(peers):
        hosts = _hosts(peers[name].addresses)
        machines[name] = first.setdefault(hosts, name) if hosts else name
    return {
        "swarm": swarm.id.hex(),
        "name": swarm.name,
        "mode": swarm.manifest.mode,
        "task": swarm.manifest.task,
        "model": swarm.manifest.model.label,
        "adapters": list(swarm.manifest.adapter_names),
        "units": units,
        "weights_bytes": swarm.manifest.total_bytes,
        "covered": not missing,
        "missing": missing,
        "ungiven": ungiven,
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
                "bits": peer.bits.hex(),
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
                "standing": standing.action(peer.peer).value,
                "trust": standing.trust(peer.peer),
                "findings": standing.of(peer.peer).sentences(),
            }
            for peer in sorted(peers.values(), key=lambda peer: (peer.span, peer.name, peer.peer))
            if peer.span[1] > 0
        ],
        "bootstraps": sorted(peer.peer for peer in peers.values() if peer.span[1] == 0),
        "addresses": {peer.peer: list(peer.addresses) for peer in peers.values()},
    }


@lru_cache(maxsize=4096)
def _hosts(addresses: tuple[str, ...]) -> frozenset[str]:
    return frozenset(host for each in addresses if not is_relayed(each) and (host := host_of(each)) is not None)


MOST = 24  # decisions in one explanation
LEAST_TRUST = 0.005  # that is shown as a figure
DOES = {
    State.JOINING: "is about to take",
    State.LOADING: "loads",
    State.READY: "has",
    State.DRAINING: "takes nothing new, and finishes its texts with",
    State.OFFLINE: "has left, and had",
    State.PAUSED: "is paused, and had",
}


def explain(host: Host, about: str = "", decisions: Iterable[Decision] = ()) -> dict[str, Any]:
    """Return the facts and the latest decisions that concern `about`, as a dict with "facts" and "decisions" (latest first).

    `about` is the name of a peer, its id or the end of it, the number of a unit, or the beginning of a session's trace id; empty
    for this peer. `decisions` are further ones of this peer. Facts are given for peers and units only.
    """
    peer = _peer(host, about)
    subjects = {peer or about}
    if peer is None or peer.endswith(about):  # a name must not match the ends of other ids
        subjects.add(about)
    found = {decision for subject in subjects for decision in host.decisions.about(subject)}
    found |= set(decisions) if peer == host.peer_id else set()
    latest = sorted(found, key=lambda decision: -decision.at)[:MOST]
    return {"facts": list(_facts(host, about, peer)), "decisions": [decision.to_json() for decision in latest]}


def _peer(host: Host, about: str) -> PeerId | None:
    """Return the peer that `about` names; None if it names none, or if it is empty and this peer announces nothing."""
    if names_unit(about) or (not about and host.directory.own is None):  # a client announces nothing
        return None
    if not about:
        return host.peer_id
    known = {**host.directory.suspects(), **host.directory.peers()}
    if host.directory.own is not None:
        known[host.peer_id] = host.directory.own
    # A name goes before the end of an id: short names end some ids by chance.
    named = (peer for peer, announced in known.items() if announced.name == about)
    ended = (peer for peer in (host.peer_id, *known) if peer.endswith(about))
    return next(chain(named, ended), None)


def _facts(host: Host, about: str, peer: PeerId | None) -> Iterator[str]:
    if names_unit(about):
        unit = int(about)
        holders = [announced for announced in host.directory.peers().values() if announced.holds(unit)]
        yield (
            f"layer {unit} is on {counted(len(holders), 'machine')}, or will be soon"
            if holders
            else f"no machine has layer {unit}"
        )
        for holder in holders:
            yield f"{holder.peer[-8:]} {holder.name}: {DOES[holder.life]} {layers(*holder.span)}, {_load(holder)}"
    elif peer is not None:
        yield from _of_peer(host, peer)


def _of_peer(host: Host, peer: PeerId) -> Iterator[str]:
    announced = host.directory.own if peer == host.peer_id else host.directory.peers().get(peer)
    suspect = host.directory.suspects().get(peer)
    if suspect is not None:
        cause = host.directory.why_suspected(peer)
        if cause in ErrorCode.__members__:  # some are named by their code
            cause = ERROR_TEXT[ErrorCode[cause]]
        yield f"it is left out after a failure, until it announces itself anew: {cause}"
    if announced is None and suspect is None:
        yield "nothing is known about it: it only uses the swarm, has left, or is new"
        return
    yield from _announced(announced or suspect)  # type: ignore[arg-type]  # one of the two is there
    if peer == host.peer_id:
        yield host.paths.reachability.in_words
    else:
        yield from _own_findings(host, announced or suspect)  # type: ignore[arg-type]


def _announced(peer: Announcement) -> Iterator[str]:
    yield f"it {DOES[peer.life]} {layers(*peer.span)} on {peer.device or 'a device that it does not name'}"
    if peer.life is State.PAUSED:
        return
    yield f"it has {_load(peer)}, and memory for {peer.cache_tokens_free:,} more tokens"
    speeds = (
        ("writes", peer.decode_units_per_s),
        ("reads prompts at", peer.prefill_units_per_s),
        ("trains on", peer.training_units_per_s),
    )
    units = Span(*peer.span).units
    told = [f"{does} {speed / units:,.3g} tokens/s" for does, speed in speeds if speed and units]
    if told:
        yield f"through its layers it {', '.join(told)}, as it measured"
    if peer.parallel_speedup > 1:
        yield f"several texts together get {peer.parallel_speedup:.3g} times that, on different devices"


def _own_findings(host: Host, peer: Announcement) -> Iterator[str]:
    """Yield this machine's own findings about `peer`, whatever that peer announces."""
    unit_s, rtt_s = host.observed_latency.unit_s(peer.peer), host.paths.link_statistics.rtts_s().get(peer.peer)
    units = Span(*peer.span).units
    yield (
        "this machine has not used it lately"
        if unit_s is None or not units
        else f"it wrote {1 / (unit_s * units):,.3g} tokens/s when this machine used it"
    )
    yield "the distance to it is not measured" if rtt_s is None else f"it is {rtt_s * 1e3:.1f} ms away"
    action = host.standing.action(peer.peer)
    if action is PeerAction.SHUN:
        yield "checks found wrong results of it, so this machine does not use it for a week"
    elif action is PeerAction.DOUBT:
        yield "its result contradicted another machine's, and one of the two is wrong"
    yield from (f"last finding of the kind {finding}" for finding in host.standing.of(peer.peer).sentences())
    trust = host.standing.trust(peer.peer)
    yield (
        f"this machine trusts it {trust:.0%}; results that are checked and right raise that"
        if trust >= LEAST_TRUST
        else "its results have hardly been checked from here yet"
    )


def _load(peer: Announcement) -> str:
    return f"{counted(peer.sessions, 'text')} now" if peer.sessions else "no text now"


ASSUMED_BPS = 1e8  # bandwidth of all links if none was measured
AWAY = (State.OFFLINE, State.DRAINING)


def link_matrix(host: Host, units: int, most: int) -> dict[str, Any]:
    """Return the links between the first `most` peers with units, as matrices: rows send, columns receive.

    `rtt_s` is in seconds; `measured` says whether the two peers measured it; `bandwidth_bps` is None if it is unknown.
    """
    paths, own = host.paths, host.directory.network.peer_id
    rtts_s = paths.link_statistics.rtts_s()
    view = view_of(units, host.directory.peers().values(), observer=own, rtt_s=rtts_s, coordinate=paths.coordinate)
    holders = sorted((peer for peer in view.peers if peer.span.units), key=lambda peer: (peer.span, peer.peer))
    peers = [peer.peer for peer in holders[:most]]
    rtt_s = 2 * one_way_delays(view, peers)
    np.fill_diagonal(rtt_s, 0.0)
    rates_bps = bandwidths(view, peers).tolist()
    return {
        "peers": peers,
        "rtt_s": rtt_s.round(6).tolist(),
        "measured": [[(a, b) in view.rtt_s or (b, a) in view.rtt_s for b in peers] for a in peers],
        "bandwidth_bps": [[None if math.isinf(rate_bps) else rate_bps for rate_bps in row] for row in rates_bps],
    }


def measured_network(swarm: Swarm, announced: Mapping[PeerId, Announcement]) -> dict[str, Any]:
    """Return a scenario (`plan/offline/planner_files.py`) of the peers that lend a machine, in the order of their ids.

    `estimated` lists the pairs [from, to] whose delay follows from coordinates or is assumed, and those whose bandwidth was not
    measured. Raises LocalError if no peer lends a machine.
    """
    assert swarm.manifest is not None
    lenders = [one for _, one in sorted(announced.items()) if one.memory_bytes > 0 and one.life not in AWAY][
        :MAX_DEVICES
    ]
    if not lenders:
        raise LocalError(f"no peer lends a machine to {swarm.name} at the moment, so there is no network to write")
    names, view = [one.peer for one in lenders], view_of(swarm.manifest.model.units, lenders)
    bandwidth_NN = bandwidths(view, names)
    known_bps = bandwidth_NN[np.isfinite(bandwidth_NN)].tolist()
    filled_NN = np.where(np.isfinite(bandwidth_NN), bandwidth_NN, statistics.median(known_bps or [ASSUMED_BPS]))
    pairs = list(permutations(range(len(lenders)), 2))
    ids = {pair: (names[pair[0]], names[pair[1]]) for pair in pairs}
    is_measured = {pair: ids[pair] in view.rtt_s or ids[pair][::-1] in view.rtt_s for pair in pairs}
    has_rate = {
        (one, other): ids[one, other] in view.path_bps
        or (view.peers[one].up_bps > 0 and view.peers[other].down_bps > 0)
        for one, other in pairs
    }
    return {
        "name": swarm.name,
        "swarm": swarm.id.hex(),
        "devices": len(lenders),
        "peer": names,
        "region": [one.name or None for one in lenders],
        "gpu": [one.device or None for one in lenders],
        "memory_gb": [one.memory_bytes / 1e9 for one in lenders],
        "decode_units_per_s": [one.decode_units_per_s or None for one in lenders],
        "training_units_per_s": [one.training_units_per_s or None for one in lenders],
        "delay_ms": _rounded(1e3 * one_way_delays(view, names), 3),
        "bandwidth_gbps": _rounded(filled_NN / 1e9, 6),
        "estimated": {
            "delay_ms": [pair for pair in pairs if not is_measured[pair]],
            "bandwidth_gbps": [pair for pair in pairs if not has_rate[pair]],
        },
    }


def _rounded(matrix_NN: Floats, digits: int) -> list[list[float]]:
    """Return rows of rounded numbers: 0 on the diagonal, and elsewhere at least the smallest step."""
    apart_NN = np.where(np.eye(len(matrix_NN), dtype=bool), 0.0, np.maximum(matrix_NN, 10.0**-digits))
    rows: list[list[float]] = apart_NN.round(digits).tolist()
    return rows
