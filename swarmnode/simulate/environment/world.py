"""Simulated world: peers that join, choose layers, load them, serve, move and vanish, as nodes do.

A peer's life is that of `node/node.py`: join -> claim a span -> get the weights -> serve -> (move) -> leave. Every choice on
the way is made by the functions that nodes call, on the picture of the simulated directory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Protocol

from swarmnode.plan.cost import BYTES_PER_HIDDEN
from swarmnode.plan.spans.flow import supply_of, throughput
from swarmnode.plan.spans.span_placement import Joiner, Move, MovePolicy, PlacementRule, choose_span
from swarmnode.plan.view import Span, View
from swarmnode.plan.virtual_clock import Action, VirtualClock
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.simulated_directory import Outlook, SimulatedDirectory
from swarmnode.simulate.results.measures import Measures
from swarmnode.simulate.settings import SwarmSettings
from swarmnode.swarm.records.announcement import State

MAX_ASKED = 64  # peers among which a newcomer looks for the fastest path to a holder of its weights
DECISIONS = 10  # most decisions of each peer before training begins, while a move loses nothing
FIRST_CHOOSERS = 200  # peers of a large swarm that choose one after another before the simulation begins

Choose = Callable[[View, Joiner], Span]
"""Function that chooses the units of a peer from its view."""


class SimulatedWorkload(Protocol):
    """Work of the swarm, serving or training. The world calls it when a peer becomes ready, leaves or is lost."""

    @property
    def has_learnt(self) -> bool:
        """Whether newcomers must download more than the initial weights."""

    def begin(self) -> None:
        """Begin the work, once all initial peers hold their layers."""

    def gauges(self) -> dict[str, float]:
        """Return the current values for the curves, by name."""

    def ready(self, peer: Peer) -> None:
        """Take in `peer`, which has loaded its layers and begins to serve or train them."""

    def leaving(self, peer: Peer) -> None:
        """Move the work of `peer`, which is about to leave, to other peers."""

    def lost(self, peer: Peer) -> None:
        """Drop `peer`, which vanished without a goodbye. Other peers notice `detect_s` seconds later."""


@dataclass(eq=False)
class World:
    """All peers of a simulation, alive or not. `peers[i]` has index `i` in `links`."""

    clock: VirtualClock
    model: Model
    links: Links
    peers: Sequence[Peer]
    settings: SwarmSettings
    measures: Measures
    chance: random.Random
    _: KW_ONLY
    trains: bool

    def __post_init__(self) -> None:
        self.peers = list(self.peers)
        self.by_id: dict[str, Peer] = {}
        self.met: dict[str, Peer] = {}  # by id, also peers that are gone but still in the directory
        self.directory = SimulatedDirectory(
            self.clock, self.model.units, self.settings.directory, self.model.hidden * BYTES_PER_HIDDEN
        )
        self.choose: Choose = choose_span  # a study may replace it
        self.workload: SimulatedWorkload
        self._spares_wait = False  # the peers that a plan leaves out stand by only after a peer is lost
        self._stood_by_at = 0  # the directory's revision at the last look of the peers without units
        self._move_policy = MovePolicy(for_gain=self.settings.rebalance)
        self._outlook = Outlook(self.directory, self.measures, self._move_policy)

    def __repr__(self) -> str:
        alive = sum(peer.alive for peer in self.peers)
        return f"<World of {alive} live peers of {len(self.peers)} at {self.clock.now_s:.0f} s, {self.directory!r}>"

    def follow(self, rule: PlacementRule, hysteresis: float) -> None:
        """Place peers by `rule` instead of the rule for serving, with `hysteresis` for moves."""
        self.choose = rule.choose
        self._move_policy = replace(self._move_policy, hysteresis=hysteresis)
        self._outlook = Outlook(self.directory, self.measures, self._move_policy, rule)

    def begin(self, workload: SimulatedWorkload, spans: Sequence[Span] | None = None) -> None:
        """Place all peers in `spans`, or without `spans` let them choose one after another; then start the directory.

        In a large swarm only the first peers choose; the others are copies of them and take the same spans.
        """
        self.workload = workload
        choosers = min(len(self.peers), max(FIRST_CHOOSERS // self.links.sites, 1) * self.links.sites)
        for number, peer in enumerate(self.peers):
            self._introduce(peer)
            if peer.capacity_units == 0:
                continue
            if spans is not None:
                peer.span = spans[number]
            elif number < choosers:
                peer.span = self.choose(self.directory.view(), peer.joiner())
            else:
                peer.span = self.peers[number % choosers].span
            self._announce_place(peer)
        if spans is None and self.trains:
            # All peers choose again, one after another, until none changes its span.
            for _ in range(DECISIONS - 1):
                turns = self.chance.sample(list(self.by_id.values()), len(self.by_id))
                if not sum(self._chooses_anew(peer) for peer in turns):
                    break
        for peer in self.by_id.values():
            if peer.span.units:
                self._serve(peer)
        self.directory.start()
        if spans is not None:
            self._spares_wait = self.trains
            return
        if self.trains:
            self._stand_by()
        self._review_places()

    def _announce_place(self, peer: Peer) -> None:
        """Announce the peer's span to all peers at once; a peer without layers stands by."""
        peer.state = State.READY if peer.span.units else State.JOINING
        self.directory.announce(peer.view())
        self.directory.know_now()

    def _chooses_anew(self, peer: Peer) -> bool:
        before, peer.span = peer.span, self._choose(peer)
        self._announce_place(peer)
        return peer.span != before

    def throughput(self) -> float:
        """Return the tokens/s that the current placement can serve if every session is computed alone; batching adds to it."""
        holders = ((*peer.span, peer.device.decode_units_per_s) for peer in self.by_id.values() if peer.serves)
        return throughput(supply_of(self.model.units, holders))

    def utilisation(self) -> float:
        """Return the share of the simulated time that peers computed; peers that are away count as idle."""
        return sum(peer.busy_s for peer in self.peers) / (len(self.peers) * max(self.clock.now_s, 1e-9))

    # -- coming and going

    def join(self, peer: Peer) -> None:
        """Let `peer` join with a new id. It claims a span and chooses again after `settle_s` seconds. Does nothing if it is
        alive."""
        if peer.alive:
            return
        self._introduce(peer)
        if peer.capacity_units == 0:
            return
        peer.state, peer.span = State.JOINING, self._choose(peer)
        self.directory.announce(peer.view())
        self._later(peer, self.settings.settle_s, lambda: self._settle(peer))

    def vanish(self, peer: Peer) -> None:
        """Remove `peer` without a goodbye. Does nothing if it is not alive."""
        if not peer.alive:
            return
        peer.state = State.OFFLINE
        peer.life += 1
        self.by_id.pop(peer.peer)
        self.links.reset(peer.index)
        self.directory.vanish(peer.peer)
        self.measures.count("peers lost", 1)
        self.workload.lost(peer)
        if self._spares_wait:
            self._spares_wait = False
            self._stand_by()

    def _introduce(self, peer: Peer) -> None:
        peer.life += 1
        peer.peer = f"{peer.index:05d}.{peer.life}"
        peer.started_at = self.clock.now_s + 1e-6 * peer.index
        peer.sessions = 0
        peer.load_is_news, peer.wish = False, None
        if peer.capacity_units:
            self.by_id[peer.peer] = self.met[peer.peer] = peer

    def _choose(self, peer: Peer) -> Span:
        return self.measures.timed("choose", lambda: self.choose(self.directory.view(), peer.joiner()))

    def _settle(self, peer: Peer) -> None:
        """Choose again, now that the claims of others are known, and load the span; stand by if none is needed."""
        peer.span = self._choose(peer)
        if peer.span.units:
            self._load(peer, lambda: self._loaded(peer))
        else:
            self.directory.announce(peer.view())

    def _load(self, peer: Peer, loaded: Action) -> None:
        peer.state = State.LOADING
        self.directory.announce(peer.view())
        # The weights come over the fastest path from a holder of some of them; if none is found, the fastest path here counts.
        size_bytes = self.model.loaded_bytes(peer.span, trains=self.trains, learnt=self.workload.has_learnt)
        asked = self.chance.sample(list(self.by_id.values()), min(MAX_ASKED, len(self.by_id)))
        holders = [
            other.index for other in asked if other.serves and other is not peer and other.span.overlaps(peer.span)
        ]
        fastest_bps = max((self.links.bandwidth_bps(other, peer.index) for other in holders), default=None)
        download_s = size_bytes * 8 / (fastest_bps or self.links.best_bps(peer.index))
        self.measures.count("weights downloaded, bytes", size_bytes)
        self._later(peer, download_s + size_bytes / self.settings.load_bytes_per_s, loaded)

    def _loaded(self, peer: Peer) -> None:
        self._serve(peer)
        self.directory.announce(peer.view())

    def _serve(self, peer: Peer) -> None:
        peer.state = State.READY
        sizes = self.model.training_sizes if self.trains else self.model.serving_sizes
        peer.cache_free_bytes = self.model.free_bytes(peer.device.memory_bytes, peer.span, sizes)
        self.workload.ready(peer)

    # -- looking

    def _stand_by(self) -> None:
        """Let the peers without layers choose again if the directory has changed, until the first takes layers; repeat every
        `look_s`."""
        if self._stood_by_at != self.directory.revision:
            self._stood_by_at = self.directory.revision
            spares = (peer for peer in self.by_id.values() if peer.state is State.JOINING and not peer.span.units)
            for peer in spares:
                peer.span = self._choose(peer)
                if peer.span.units:
                    self._load(peer, partial(self._loaded, peer))
                    break
        self.clock.after(self.settings.move_interval_s, self._stand_by)

    def _review_places(self) -> None:
        """Ask all ready peers for a move, on the same picture. A peer moves if its wish is the same after the move's delay."""
        ready = [peer for peer in self.by_id.values() if peer.state is State.READY]
        for peer in [] if self._outlook.all_stay() else ready:
            move = self._outlook.move(peer)
            if move is None:
                peer.wish = None
            elif peer.wish is None or not move.is_same_wish(peer.wish):
                peer.wish = move
                self._later(peer, move.delay_s, partial(self._act, peer, move))
        self.clock.after(self.settings.move_interval_s, self._review_places)

    def _act(self, peer: Peer, wish: Move) -> None:
        """Move the peer if it is ready and still has the same wish."""
        move = self._outlook.move(peer) if peer.wish is wish and peer.state is State.READY else None
        if move is not None and move.is_same_wish(wish):
            self.move(peer, move.span)

    def move(self, peer: Peer, span: Span) -> None:
        """Drain `peer`, then load `span`, or stand by if `span` is empty."""
        self.measures.count("moves", 1)
        peer.state = State.DRAINING
        self.directory.announce(peer.view())
        self.workload.leaving(peer)

        left_s = self.clock.now_s

        def arrive() -> None:
            self._loaded(peer)
            peer.move_s = self.clock.now_s - left_s

        def go() -> None:
            peer.span = span
            peer.life += 1
            peer.load_is_news, peer.wish = False, None
            if span.units:
                self._load(peer, arrive)
            else:
                peer.state = State.JOINING  # stands by
                self.directory.announce(peer.view())

        self._later(peer, self.settings.detect_s, go)

    def load_changed(self, peer: Peer) -> None:
        """Announce the changed load of `peer` with its next regular announcement."""
        if peer.load_is_news:
            return
        peer.load_is_news = True
        period_s = self.directory.publish_period_s
        phase_s = period_s * peer.index / len(self.peers)

        def announce() -> None:
            peer.load_is_news = False
            self.directory.announce(peer.view())

        self._later(peer, period_s - (self.clock.now_s - phase_s) % period_s, announce)

    def _later(self, peer: Peer, delay_s: float, action: Action) -> None:
        """Call `action` after `delay_s`, unless the peer has begun another life by then."""
        life = peer.life
        self.clock.after(delay_s, lambda: action() if peer.life == life else None)
