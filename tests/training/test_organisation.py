"""How a swarm that trains organises itself, from what peers announce alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.links.link_statistics import Coordinate
from swarmnode.plan.spans.span_placement import Joiner, MovePolicy
from swarmnode.plan.training import rule as training_rule
from swarmnode.plan.training.layout import STANDING_BY, StageLayout
from swarmnode.plan.training.rule import SETTLING, StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import StepForecast, TrainingLoad, TrainingNetwork, held_units
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.swarm.records.announcement import State, StepLoad
from swarmnode.swarm.records.run import Averaging, Run
from swarmnode.training.organisation import REMEMBERED_S, AnnouncedLoad, announced_network, step_load_of

UNITS, HALF = 8, Span(0, 4)
SPEED = 20_000.0  # units/s, so that 32 microbatches of 1024 positions through 8 units on 8 peers take 1.6 s
LOAD = TrainingLoad(32, 4e6, np.full(UNITS, 4e6), np.ones(UNITS), np.full(UNITS, 12e6))
PLACES_MS = ((0.0, 0.0, 0.0), (300.0, 0.0, 0.0))  # of two islands, by network coordinates


def swarm(names: list[str], speeds: list[float], capacity: int = 4) -> View:
    """Peers by turns on one island and the other, all of them holding the first units."""
    peers = tuple(
        PeerView(name, Span(0, capacity), State.READY, speed, up_bps=1e8, down_bps=1e8, memory_bytes=capacity)
        for name, speed in zip(names, speeds, strict=True)
    )
    coordinates = {name: Coordinate(PLACES_MS[number % 2], 0.5, 0.1) for number, name in enumerate(names)}
    return View(UNITS, peers, coordinates=coordinates)


def measured(view: View, between_bps: float = 1e8) -> View:
    """All told each other's delays and bandwidths, slow between the islands."""
    names = [peer.peer for peer in view.peers]
    pairs = list(permutations(range(len(names)), 2))
    rtt_s = {(names[one], names[other]): 0.1 if (one - other) % 2 else 0.002 for one, other in pairs}
    path_bps = {(names[one], names[other]): between_bps if (one - other) % 2 else 1e9 for one, other in pairs}
    return replace(view, rtt_s=rtt_s, path_bps=path_bps)


def rule(*, begun: bool = False, load: TrainingLoad = LOAD) -> TrainingRule:
    return TrainingRule(StepOutlook(lambda: load, announced_network), lambda peer: peer.memory_bytes, lambda: begun)


def joiner(peer: PeerView) -> Joiner:
    return Joiner(peer.peer, peer.memory_bytes, peer.decode_units_per_s, peer.started_at)


def settled(view: View, *, rounds: int = 9) -> View:
    """Each decides for itself, in turn, until nobody would rather be elsewhere."""
    own_rule = rule()
    for _ in range(rounds):
        before = view
        for number, peer in enumerate(view.peers):
            span = own_rule.choose(view, joiner(peer))
            moved = (*view.peers[:number], replace(peer, span=span), *view.peers[number + 1 :])
            view = replace(view, peers=moved)
        if view == before:
            return view
    raise AssertionError("they never come to rest")


def step_s(view: View) -> float:
    spans = [peer.span for peer in view.peers]
    return StepForecast(LOAD, announced_network(view, view.peers)).step_s(spans)


@pytest.mark.parametrize("seed", range(3))
def test_the_slow_link_carries_the_least_whatever_the_names(seed: int) -> None:
    """Each holds half of the model: both islands get both halves."""
    names = [f"peer {number}" for number in range(8)]
    by_order = step_s(settled(swarm(names, [SPEED] * 8)))
    random.Random(seed).shuffle(names)
    view = settled(swarm(names, [SPEED] * 8))
    for island in range(2):
        assert Counter(peer.span for peer in view.peers[island::2]) == {HALF: 2, Span(4, 8): 2}
    assert step_s(view) == pytest.approx(by_order)


def test_who_can_hold_nothing_is_nobody_that_is_left_out() -> None:
    """A bootstrap peer is there, lends nothing, and made leaving others out look dearer."""
    reckoned_with = set[str]()

    def network(view: View, peers: Sequence[PeerView]) -> TrainingNetwork:
        reckoned_with.update(peer.peer for peer in peers)
        return announced_network(view, peers)

    view = swarm(["a", "b", "door"], [SPEED] * 3)
    door = replace(view.peers[2], span=STANDING_BY, memory_bytes=0)
    view = replace(view, peers=(*view.peers[:2], door))
    own_rule = TrainingRule(StepOutlook(lambda: LOAD, network), lambda peer: peer.memory_bytes, lambda: False)
    assert own_rule.choose(view, joiner(view.peers[0])).units
    assert reckoned_with == {"a", "b"}


def test_nobody_is_believed_to_be_faster_than_all_others_together() -> None:
    """One says that it is a million times as fast: the others train on."""
    view = settled(swarm([f"peer {number}" for number in range(8)], [SPEED * 1e6, *[SPEED] * 7], capacity=UNITS))
    holders = Counter(unit for peer in view.peers[1:] for unit in range(*peer.span))
    assert min(holders[unit] for unit in range(UNITS)) >= 1


@pytest.mark.parametrize(("claimed_bps", "line_bps"), [(0.0, 0.0), (1e18, 1e9)])
def test_nobody_joins_two_islands_by_what_it_alone_says_or_what_nobody_knows(
    claimed_bps: float, line_bps: float
) -> None:
    """A newcomer that nobody has measured, or one that says it is beside everybody: each island still has whole pipelines."""
    honest = swarm([f"peer {number}" for number in range(8)], [SPEED] * 8)
    honest = replace(honest, peers=tuple(replace(p, up_bps=line_bps, down_bps=line_bps) for p in honest.peers))
    honest = measured(honest)
    names = [peer.peer for peer in honest.peers]
    stranger = PeerView("peer 3x", STANDING_BY, State.READY, SPEED, memory_bytes=4)
    view = replace(honest, peers=(*honest.peers, replace(stranger, up_bps=claimed_bps, down_bps=claimed_bps)))
    if claimed_bps:
        said = {(stranger.peer, name) for name in names}
        rtt_s = honest.rtt_s | dict.fromkeys(said, 0.0) | {(name, stranger.peer): 0.1 for name in names}
        view = replace(view, path_bps=honest.path_bps | dict.fromkeys(said, claimed_bps), rtt_s=rtt_s)
    alone = settled(honest)
    among = replace(honest, peers=settled(view).peers[:-1])
    assert step_s(among) <= 1.05 * step_s(alone)


def test_nobody_joins_two_islands_by_round_trips_that_it_alone_tells() -> None:
    """Peers of two islands measured each other; a ninth tells of no time to any of them, and nobody has measured it."""
    honest = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    names = [peer.peer for peer in honest.peers]
    liar = PeerView("peer 3x", STANDING_BY, State.READY, SPEED, up_bps=1e9, down_bps=1e9, memory_bytes=4)
    told_s = dict.fromkeys(((liar.peer, name) for name in names), 0.0)
    view = replace(honest, peers=(*honest.peers, liar), rtt_s=honest.rtt_s | told_s)
    delay_NN = announced_network(view, view.peers).delay_NN
    assert delay_NN[8, :8].min() == pytest.approx(0.05), "as far as the islands are from each other"
    assert (delay_NN[:8, :8] == announced_network(honest, honest.peers).delay_NN).all()


def test_who_tells_the_truth_is_believed_before_others_have_measured_it() -> None:
    honest = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    names = [peer.peer for peer in honest.peers]
    rtt_s = {pair: seconds for pair, seconds in honest.rtt_s.items() if pair[1] != names[3]}
    alone, known = (announced_network(view, honest.peers).delay_NN for view in (replace(honest, rtt_s=rtt_s), honest))
    assert alone == pytest.approx(known)


def test_once_training_has_begun_who_comes_takes_what_one_peer_alone_holds() -> None:
    """All stand badly; it ends where the others end."""
    view = swarm([f"peer {number}" for number in range(3)], [SPEED] * 3)
    spans = [HALF, HALF, Span(4, 8)]
    view = replace(view, peers=tuple(replace(p, span=span) for p, span in zip(view.peers, spans, strict=True)))
    assert rule(begun=True).choose(view, Joiner("new", 5, SPEED, 1.0)) == Span(4, 8)


@pytest.mark.parametrize("begun", [True, False])
def test_a_layout_is_looked_for_once(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as little is different: it takes long."""
    looked_for = list[tuple[Any, ...]]()
    find = training_rule.likely_layouts

    def look(*about: Any, **options: int) -> StageLayout:
        looked_for.append(about)
        return find(*about, **options)

    monkeypatch.setattr(training_rule, "likely_layouts", look)
    view, one = swarm([f"peer {number}" for number in range(4)], [SPEED] * 4), rule(begun=begun)
    for peer in view.peers:
        one.choose(view, joiner(peer))
    assert len(looked_for) == 1


@pytest.mark.parametrize(("after_s", "faster", "looks"), [(19.0, 1, 1), (21.0, 1, 2), (19.0, 2, 2)])
def test_layouts_are_not_looked_for_all_the_time(
    after_s: float, faster: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second each time, and of links every measurement says something else; of speeds it does not."""
    now_s, looked_for = [0.0], list[StepForecast]()
    find = training_rule.likely_layouts

    def look(forecast: StepForecast, capacities: Sequence[int]) -> Any:
        now_s[0] += 1.0
        looked_for.append(forecast)
        return find(forecast, capacities)

    monkeypatch.setattr(training_rule, "likely_layouts", look)
    outlook = StepOutlook(lambda: LOAD, announced_network, clock=lambda: now_s[0])
    one = TrainingRule(outlook, lambda peer: peer.memory_bytes, lambda: False)
    for between_bps, speed in ((1e8, SPEED), (2e7, faster * SPEED)):
        view = measured(swarm([f"peer {number}" for number in range(4)], [speed] * 4), between_bps)
        one.choose(view, joiner(view.peers[0]))
        now_s[0] += after_s
    assert len(looked_for) == looks


@pytest.mark.parametrize(("begun", "first"), [(True, 2), (False, 4)])
def test_all_go_to_other_stages_where_the_rest_of_the_run_pays_for_what_is_fetched(begun: bool, first: int) -> None:
    """Eight peers by turns on two islands hold the halves so that all that is trained crosses the link between these. Once
    something is trained one goes first on each island: what it has to learn crosses the link once."""
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    across = [Span(4, 8) if number % 2 else HALF for number in range(8)]
    view = replace(view, peers=tuple(replace(p, span=span) for p, span in zip(view.peers, across, strict=True)))

    own_rule = rule(begun=begun, load=replace(LOAD, activation_bytes=4e7))

    def movers(stay_s: float) -> int:
        policy = MovePolicy(move_s=1.0, stay_s=stay_s)
        return sum(own_rule.reconsider(view, joiner(peer), policy) is not None for peer in view.peers)

    assert movers(1800.0) == first
    assert movers(1.0) == 0


@pytest.mark.parametrize(("between_bps", "goes_across"), [(1e5, False), (1e9, True)])
def test_where_no_step_can_be_done_those_go_on_who_have_the_weights_soonest(
    between_bps: float, goes_across: bool
) -> None:
    """One half is lost. On the other island are cards three times as fast, to which the weights would take hours, or seconds."""
    speeds = [SPEED, 3 * SPEED] * 4
    view = measured(swarm([f"peer {number}" for number in range(8)], speeds, capacity=UNITS), between_bps)
    peers = tuple(
        replace(peer, span=STANDING_BY, state=State.JOINING) if number % 2 else replace(peer, span=HALF)
        for number, peer in enumerate(view.peers)
    )
    view = replace(view, peers=peers)
    one = TrainingRule(
        StepOutlook(lambda: LOAD, announced_network),
        lambda peer: peer.memory_bytes,
        lambda: False,
        under_way=lambda: True,
    )
    across = [one.choose(view, joiner(peer)) for peer in view.peers[1::2]]
    assert any(span.units for span in across) == goes_across


def test_a_first_step_waits_until_all_are_at_the_places_to_which_they_go_alike() -> None:
    """Eight peers by turns on two islands hold the halves so that all that is trained crosses the link between these."""
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    halves = [Span(4 * (number % 2), 4 * (number % 2) + 4) for number in range(8)]
    view = replace(view, peers=tuple(replace(peer, span=half) for peer, half in zip(view.peers, halves, strict=True)))
    load = replace(LOAD, activation_bytes=4e7)
    one = TrainingRule(
        StepOutlook(lambda: load, announced_network),
        lambda peer: peer.memory_bytes,
        lambda: False,
        under_way=lambda: True,
    )

    def place_of(peer: PeerView, view: View) -> Span:
        move = one.reconsider(view, joiner(peer), MovePolicy(hysteresis=SETTLING, for_gain=False))
        return peer.span if move is None else move.span

    places = [place_of(peer, view) for peer in view.peers]
    assert one.first_places.awaited and places != halves
    for state, awaited in ((State.LOADING, True), (State.READY, False)):
        gone = replace(
            view,
            peers=tuple(
                replace(peer, span=place, state=State.READY if place == peer.span else state)
                for peer, place in zip(view.peers, places, strict=True)
            ),
        )
        assert place_of(gone.peers[0], gone) == places[0]
        assert one.first_places.awaited is awaited


def test_who_is_there_but_has_not_trained_yet_is_no_holder_that_others_may_leave_behind() -> None:
    """A node is ready before it has learnt what the others know."""
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    across = [
        replace(peer, span=Span(4, 8) if number % 2 else HALF, has_trained=number < 2)
        for number, peer in enumerate(view.peers)
    ]
    view = replace(view, peers=tuple(across))
    own_rule = rule(begun=True, load=replace(LOAD, activation_bytes=4e7))
    moves = [own_rule.reconsider(view, joiner(peer), MovePolicy(move_s=1.0)) for peer in view.peers]
    assert moves[:2] == [None, None] and any(moves[2:])


def test_what_a_step_asks_is_looked_at_anew_once_it_is_known() -> None:
    """Next to nothing is handed on between stages of the usual run; of this one nearly all is, so pipelines stay on islands."""
    loads = [replace(LOAD, activation_bytes=1.0, gradient_bytes_U=np.full(UNITS, 4e7))]
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    one = TrainingRule(StepOutlook(lambda: loads[-1], announced_network), lambda peer: peer.memory_bytes, lambda: False)
    usual = [one.choose(view, joiner(peer)) for peer in view.peers]
    assert not {*usual[::2]} & {*usual[1::2]}, "whole stages on islands: replicas are near"
    loads.append(replace(LOAD, activation_bytes=4e7, gradient_bytes_U=np.full(UNITS, 1.0)))
    known = [one.choose(view, joiner(peer)) for peer in view.peers]
    assert {*known[::2]} == {*known[1::2]} == {HALF, Span(4, 8)}, "whole pipelines on islands"


SMALL = replace(LOAD, microbatches=1, activation_bytes=1e3, gradient_bytes_U=np.full(UNITS, 4e6))
"""A run, whose stages are whole on islands."""
HANDED_ON = replace(LOAD, activation_bytes=4e7, gradient_bytes_U=np.full(UNITS, 1.0))
"""One by which pipelines stay on islands"""


def as_a_run_asks(view: View, run: TrainingLoad) -> list[Span]:
    one = rule(load=run)
    return [one.choose(view, joiner(peer)) for peer in view.peers]


def test_stages_are_laid_for_a_small_run() -> None:
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    spans = as_a_run_asks(view, SMALL)
    assert held_units(spans, UNITS).sum(axis=0).min() == 2
    assert not {*spans[::2]} & {*spans[1::2]}


@pytest.mark.parametrize(("each_bytes", "leaves_out"), [(1e3, False), (1e7, True)])
def test_nobody_is_left_out_for_a_moment(each_bytes: float, leaves_out: bool) -> None:
    """Of a step of which little but delays is waited for; where neither activations nor gradients are soon across between the
    islands one of them is enough, with two holders of each unit."""
    run = replace(SMALL, activation_bytes=each_bytes, gradient_bytes_U=np.full(UNITS, each_bytes))
    view = measured(swarm([f"peer {number}" for number in range(8)], [100 * SPEED] * 8), between_bps=2e7)
    spans = as_a_run_asks(view, run)
    assert held_units(spans, UNITS).sum(axis=0).min() >= 2
    assert (STANDING_BY in spans) == leaves_out


@pytest.mark.parametrize("begun", [True, False])
def test_who_stands_as_a_run_asks_stays_until_another_asks_otherwise(begun: bool) -> None:
    view = measured(swarm([f"peer {number}" for number in range(8)], [SPEED] * 8))
    spans = as_a_run_asks(view, SMALL)
    view = replace(view, peers=tuple(replace(p, span=span) for p, span in zip(view.peers, spans, strict=True)))
    for run, moves in ((SMALL, False), (HANDED_ON, True)):
        one = rule(begun=begun, load=run)
        wishes = [one.reconsider(view, joiner(peer), MovePolicy(move_s=1.0)) for peer in view.peers]
        assert any(wishes) == moves


@pytest.mark.parametrize(
    ("averaging", "averaged_millibytes"),
    [
        (Averaging(), 4000),
        (Averaging(every=10), 400),
        (Averaging(codec=Codec.FP16), 2000),
        (Averaging(rank=4, every=2), round(1000 * 4 * 4 * 5 / (4 * 512) / 2)),
    ],
)
def test_a_run_tells_what_its_step_asks(averaging: Averaging, averaged_millibytes: int) -> None:
    run = Run(b"", 100, batch=24, microbatch=2, sequence=128, averaging=averaging)
    assert step_load_of(run, 512) == (12, 256, averaged_millibytes)
    assert step_load_of(msgspec.structs.replace(run, sequence=0), 512).positions == 2, "samples of a module"


@pytest.mark.parametrize(("front", "moving"), [(4, False), (1, True)])
def test_all_leave_for_another_layout_only_where_that_is_worth_it(front: int, moving: bool) -> None:
    """Before anything is trained. Four of eight peers hold three of the eight units, and the others the rest, which is little
    slower than two halves; one peer that holds them alone is waited for."""
    view = swarm([f"peer {number}" for number in range(8)], [SPEED] * 8, capacity=5)
    spans = [Span(0, 3)] * front + [Span(3, 8)] * (8 - front)
    view = replace(view, peers=tuple(replace(p, span=span) for p, span in zip(view.peers, spans, strict=True)))
    moves = [rule().reconsider(view, joiner(peer), MovePolicy(hysteresis=0.2)) for peer in view.peers]
    assert any(moves) == moving


@pytest.mark.parametrize(("under_way", "turns"), [(False, 5), (True, 1)])
def test_who_is_to_stand_by_waits_for_five_turns_unless_a_run_waits_for_it(under_way: bool, turns: int) -> None:
    """Of two islands, to join which takes too long for a small run."""
    load = replace(SMALL, activation_bytes=1e7, gradient_bytes_U=np.full(UNITS, 1e7))
    view = measured(swarm([f"peer {number}" for number in range(8)], [100 * SPEED] * 8), between_bps=2e7)
    own_rule = TrainingRule(
        StepOutlook(lambda: load, announced_network),
        lambda peer: peer.memory_bytes,
        lambda: False,
        under_way=lambda: under_way,
    )
    moves = [own_rule.reconsider(view, joiner(peer), MovePolicy(hysteresis=SETTLING)) for peer in view.peers]
    delays_s = [move.delay_s for move in moves if move is not None and not move.span.units]
    turn_s = MovePolicy().turn_s * (1 + len(view.peers) / 3)
    assert len(delays_s) == 4 and all(delay_s <= turns * turn_s for delay_s in delays_s)
    assert (max(delays_s) > turn_s) == (turns > 1)


def test_what_a_run_asks_is_remembered_while_all_who_are_in_it_move() -> None:
    """Else they would be back at the places for a usual step as soon as the last one has gone to those for the run."""
    step, now_s = (4, 512, 4000), [100.0]
    told = {"ada": step, "bob": step, "cyd": (0, 0, 0)}
    peers = {name: SimpleNamespace(life=State.READY, step_load=of) for name, of in told.items()}
    directory: Any = SimpleNamespace(peers=lambda: peers)
    announced = AnnouncedLoad(directory, lambda: now_s[0])
    assert announced() == step
    for peer in peers.values():
        peer.step_load = (0, 0, 0)
    now_s[0] += REMEMBERED_S - 1
    assert announced() == step
    now_s[0] += 2
    assert announced() == StepLoad(), "the run is over"


def test_a_wish_waits_for_its_turn() -> None:
    view = swarm([f"peer {number}" for number in range(8)], [SPEED] * 8)
    moves = [rule().reconsider(view, joiner(peer), MovePolicy()) for peer in view.peers]
    delays = {move.delay_s for move in moves if move is not None}
    assert len(delays) > 1 and all(0 <= delay <= 3.0 * (1 + 8 / 3) for delay in delays)
