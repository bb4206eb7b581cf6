"""Explanations for `swarmnode why`: current facts about a peer, a unit or a session, and the decisions that concern it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from swarmnode.counting import counted
from swarmnode.decisions import Decision, names_unit
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, state_name
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import Announcement

MOST = 24  # decisions in one explanation


def explain(host: Host, about: str = "", decisions: Iterable[Decision] = ()) -> dict[str, Any]:
    """Return the facts and the latest decisions that concern `about`, as a dict with "facts" and "decisions" (latest first).

    `about` is the name of a peer, its id or the end of it, the number of a unit, or the beginning of a session's trace id; empty
    for this peer. `decisions` are further ones of this peer. Facts are given for peers and units only.
    """
    peer = _peer(host, about)
    found = {decision for name in {about, peer or about} for decision in host.decisions.about(name)}
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
    named = (peer for peer, announced in known.items() if peer.endswith(about) or announced.name == about)
    return host.peer_id if host.peer_id.endswith(about) else next(named, None)


def _facts(host: Host, about: str, peer: PeerId | None) -> Iterator[str]:
    if names_unit(about):
        yield from _of_unit(host, int(about))
    elif peer is not None:
        yield from _of_peer(host, peer)


def _of_unit(host: Host, unit: int) -> Iterator[str]:
    holders = [announced for announced in host.directory.peers().values() if announced.holds(unit)]
    yield (
        f"unit {unit} is held by {counted(len(holders), 'peer')}, or about to be"
        if holders
        else f"no peer holds unit {unit}"
    )
    for holder in holders:
        doing = f"{state_name(holder.life)}, units {Span(*holder.span)}, {counted(holder.sessions, 'session')}"
        yield f"{holder.peer[-8:]} {holder.name}: {doing}"


def _of_peer(host: Host, peer: PeerId) -> Iterator[str]:
    announced = host.directory.own if peer == host.peer_id else host.directory.peers().get(peer)
    suspect = host.directory.suspects().get(peer)
    if suspect is not None:
        yield f"it is left out after a failure: {host.directory.why_suspected(peer)}"
    if announced is None and suspect is None:
        yield "it announces nothing: it is a client, has gone, or is not known here yet"
        return
    yield from _announced(announced or suspect)  # type: ignore[arg-type]  # one of the two is there
    if peer != host.peer_id:
        yield from _known(host, peer)


def _announced(peer: Announcement) -> Iterator[str]:
    yield f"it is {state_name(peer.life)} at units {Span(*peer.span)} on {peer.device or 'a device that it does not name'}"
    yield f"it runs {counted(peer.sessions, 'session')}, and has room for {counted(peer.cache_tokens_free, 'position')} more"
    speeds = peer.decode_units_per_s, peer.prefill_units_per_s, peer.training_units_per_s
    yield "it announces {:.4g} units/s one by one, {:.4g} in prompts, {:.4g} in training".format(*speeds)
    if peer.parallel_speedup > 1:
        yield f"several sessions together get {peer.parallel_speedup:.3g} times what one does, on different devices"
    yield f"others reach it: {peer.reach.name.lower()}"


def _known(host: Host, peer: PeerId) -> Iterator[str]:
    """Yield this peer's own findings about `peer`, whatever that peer announces."""
    unit_s, rtt_s = host.observed_latency.unit_s(peer), host.paths.link_statistics.rtts_s().get(peer)
    yield (
        "this peer has not used it lately"
        if unit_s is None
        else f"it computed {1 / unit_s:.4g} units/s when this peer used it"
    )
    yield "the path to it is not measured" if rtt_s is None else f"it is {rtt_s * 1e3:.1f} ms away"
    if peer in host.standing.shunned:
        yield "audits found that it computes wrong results, so this peer does not use it"
    elif peer in host.standing.doubted:
        yield "it contradicted another peer in an audit, and one of the two is wrong"
    yield f"its standing after audits is {host.standing.trust(peer):.2f} of 1"
