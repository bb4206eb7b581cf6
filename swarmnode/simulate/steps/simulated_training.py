"""Simulated training, microbatch by microbatch, and its coordinator (`training/coordinator/coordinator.py`).

Microbatches are wired through the replicas that will finish first. A ledger records which layers have counted which microbatches.
Microbatches of a lost peer are sent again. When all are counted the replicas average and the next step begins. The order of
actions, also after the loss of the coordinator, follows the state table of nodes (`plan/training/coordination.py`). Passes
follow the model of a step (`plan/training/step_forecast.py`), on peers that may be lost and links that compress.

Here are also the encoder of messages on the links, and the rule by which simulated peers that train choose layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.codec.training_messages import How
from swarmnode.compute.capacity.capacity import STATE_BYTES
from swarmnode.errors import UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LADDER, SPARSE_RULES, LinkCodecs, encoded_bytes
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.spans.span_placement import PlacementRule
from swarmnode.plan.training.averaging import (
    AveragingClusters,
    ClusteredGroup,
    Count,
    Holder,
    averaged_bytes,
    averaging_s,
    make_groups,
    may_cluster,
)
from swarmnode.plan.training.coordination import SETTLE_S, Action, Coordination, Event, Phase
from swarmnode.plan.training.rule import SETTLING, StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import (
    ExpectedStep,
    Passage,
    PassQueue,
    TrainingLoad,
    TrainingNetwork,
    Way,
    passing_s,
)
from swarmnode.plan.training.step_ledger import StepLedger
from swarmnode.plan.training.wiring import Replica, Transfers, book, set_at_once, wire
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.simulate.environment.links import Links
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import TrainSettings
from swarmnode.simulate.steps.simulated_all_reduce import averaging_network, reduction_ends_s, vector_bytes
from swarmnode.swarm.records.run import AUTO, Compression

FIXED = tuple(codec.name.lower() for codec in Codec if codec not in SPARSE_CODECS)

Direction = tuple[int, int, Way]
"""(sender, receiver, forward or backward): one direction of a link, with peers by index."""


class Encoder:
    """Choice of the codec for each direction of a link. `mode` is auto, the name of a codec for all links, or a rule of top-k
    (`plan/compression.py`). Values are float32, as on stages. Raises UsageError if `mode` is unknown."""

    def __init__(self, links: Links, mode: str) -> None:
        if mode not in (AUTO, *SPARSE_RULES, *FIXED):
            raise UsageError(f"--compress {mode}: choose {', '.join((AUTO, *FIXED, *SPARSE_RULES))}")
        self._beat_s = 0.0
        self._links = links
        self._mode = mode
        self.codecs = LinkCodecs[Direction](LADDER, Compression(mode))
        self._last_bytes: dict[tuple[int, int], int] = {}  # size of the last message between two peers

    def begin_step(self, beat_s: float) -> None:
        """Begin a step with the coordinator's seconds between two microbatches."""
        self._beat_s = beat_s
        self.codecs.durations.end_step()

    def size_bytes(self, link: Direction, shape: tuple[int, ...]) -> int:
        """Return the bytes of values of `shape`, encoded for the direction `link`."""
        values = [TensorInfo(Codec.NONE, DType.FLOAT32, shape)]
        directions = 2  # a stage in the middle sends both ways
        bandwidth_bps = self._links.bandwidth_bps(*link[:2])
        choice = self.codecs.choose(link, values, bandwidth_bps, self._beat_s, directions=directions)
        self._last_bytes[link[:2]] = size_bytes = encoded_bytes(values, choice.codec, choice.topk_share)
        return size_bytes

    def expected_bytes(self, peers: Sequence[int], shape: tuple[int, ...]) -> Floats:
        """Return [N, N] bytes of values between `peers`: the size of the last message from row to column. If there was none,
        the size of `shape` with the fixed codec, or uncompressed."""
        fixed = Codec.NONE if self._mode not in FIXED else Codec[self._mode.upper()]
        size_NN = np.full((len(peers), len(peers)), encoded_bytes([TensorInfo(fixed, DType.FLOAT32, shape)], fixed))
        places = {peer: number for number, peer in enumerate(peers)}
        for (sender, receiver), size_bytes in self._last_bytes.items():
            if sender in places and receiver in places:
                size_NN[places[sender], places[receiver]] = size_bytes
        return size_NN.astype(float)


@dataclass(eq=False)
class SimulatedStage:
    """Training stage of a simulated peer, from the peer's start until it vanishes or loads other layers."""

    peer: Peer
    name: PeerId
    pass_queue: PassQueue
    life: int
    layers: Callable[[Span], float]

    @property
    def lives(self) -> bool:
        """Whether the peer has neither vanished nor moved to other layers since, so that this stage still answers."""
        return self.peer.life == self.life


class SimulatedMicrobatch(Passage):
    """Attempt at a simulated microbatch `number` along a `route` of stages."""

    def __init__(self, training: Training, number: int, route: Sequence[tuple[SimulatedStage, Span]]) -> None:
        super().__init__([stage.pass_queue for stage, _ in route])
        self.number = number
        self.route = list(route)
        self._training = training

    def start(self, place: int) -> None:
        """Send the samples from the trainer, whose index in the links is `place`, to the first hop."""
        settings, model = self._training.settings, self._training.world.model
        self._travel(place, 0, model.input_bytes(settings.microbatch, settings.sequence), Way.FORWARD)

    def passes(self, name: PeerId) -> bool:
        """Return whether the peer `name` is on the route."""
        return any(stage.name == name for stage, _ in self.route)

    def duration_s(self, way: Way, hop: int) -> float:
        """Return the seconds that the device of hop `hop` takes for a pass in direction `way`."""
        stage, span = self.route[hop]
        device = stage.peer.device
        computes_s = device.prompt_s if way is Way.FORWARD else device.backward_s
        return computes_s(stage.layers(span), self._training.settings.tokens)

    def hand_on(self, way: Way, sender: int, receiver: int) -> None:
        """Send the values or gradients from hop `sender` to hop `receiver`, encoded for that link."""
        settings, model = self._training.settings, self._training.world.model
        here, there = (self.route[hop][0].peer.index for hop in (sender, receiver))
        unit = self.route[max(sender, receiver)][1].start
        shape = model.crossing(unit, settings.microbatch, settings.sequence, back=way is Way.BACKWARD)
        self._travel(here, receiver, self._training.encoder.size_bytes((here, there, way), shape), way)

    def done(self) -> None:
        """Report the end of the microbatch to the training."""
        self._training.done(self)

    def _travel(self, sender: int, hop: int, size_bytes: float, way: Way) -> None:
        clock, links = self._training.clock, self._training.world.links
        arrives_s = links.send(clock.now_s, sender, self.route[hop][0].peer.index, size_bytes)
        clock.at(arrives_s, partial(self._came, way, hop))

    def _came(self, way: Way, hop: int) -> None:
        if self.route[hop][0].lives and not self.called_back:
            self.arrived(way, hop)


def beat_s(pipeline: Sequence[PeerId], workers: Mapping[PeerId, Replica]) -> float:
    """Return the seconds between two microbatches that leave `pipeline`: those of its slowest stage. Lost peers are skipped;
    the result is infinite if all are lost."""
    return max(
        (workers[peer].span.units * workers[peer].unit_s for peer in pipeline if peer in workers), default=math.inf
    )


def share_out(microbatches: int, beats_s: Sequence[float]) -> list[int]:
    """Return the pipeline number of each microbatch: the pipeline that would finish it first, if all begin at once."""
    given = [0] * len(beats_s)
    shared = []
    for _ in range(microbatches):
        first = min(range(len(beats_s)), key=lambda number: ((given[number] + 1) * beats_s[number], given[number]))
        given[first] += 1
        shared.append(first)
    return shared


def simulated_rule(
    world: World, settings: TrainSettings, encoder: Encoder, has_begun: Callable[[], bool]
) -> TrainingRule:
    """Build the placement rule of `world` for the run in `settings`. `has_begun` tells whether a step has been trained."""
    model = world.model
    values = (settings.microbatch, settings.sequence, model.hidden)
    gradient_bytes = (
        averaged_bytes(model.parameters[unit], model.matrix_width, settings.averaging) for unit in range(model.units)
    )
    load = TrainingLoad(
        settings.microbatches,
        float(encoder.expected_bytes([0], values)[0, 0]),
        np.array(list(gradient_bytes)) / settings.averaging.every,
        np.ones(model.units),  # peers announce units/s, so all units count alike
        STATE_BYTES * np.array(model.parameters, dtype=float),
        may_cluster(settings.averaging),
    )

    def network(_view: View, seen: Sequence[PeerView]) -> TrainingNetwork:
        """Return the speeds of the `seen` peers in layers/s, and the links between them."""
        peers = [world.met[peer.peer] for peer in seen]
        devices, tokens = [peer.device for peer in peers], settings.tokens
        there_and_back_s = [each.prompt_s(1, tokens) + each.backward_s(1, tokens) for each in devices]
        return TrainingNetwork(1 / np.array(there_and_back_s), *world.links.between([peer.index for peer in peers]))

    return TrainingRule(
        StepOutlook(lambda: load, network),
        lambda peer: world.met[peer.peer].capacity_units,
        has_begun,
        under_way=lambda: world.clock.now_s > 0,
    )


MAX_PEERS = 500  # limit, because every microbatch's route is chosen among all peers
MISSING_RETRY_S = 1.0


class Training:
    """Workload of a swarm that trains. `pipelines` lists peers by index, stage after stage; each microbatch is fixed to one of
    them by speed. Without pipelines microbatches are wired freely. The trainer stands at the first place of the scenario.
    Raises UsageError if the world has more than `MAX_PEERS` peers or the settings are invalid."""

    def __init__(self, world: World, settings: TrainSettings, pipelines: Sequence[Sequence[int]] = ()) -> None:
        if len(world.peers) > MAX_PEERS:
            raise UsageError(f"training is simulated with at most {MAX_PEERS} peers, not {len(world.peers)}; use fewer")
        self.world = world
        self.clock = world.clock
        self.settings = settings
        self.encoder = Encoder(world.links, settings.compress)
        self.step = 0
        rule = simulated_rule(world, settings, self.encoder, lambda: self.has_learnt)
        world.follow(PlacementRule(rule.choose, rule.reconsider), SETTLING)
        self._run = settings.run
        self._pipelines = pipelines
        self._pipeline_of: Sequence[int] = ()  # by microbatch of the step
        self._stages: dict[PeerId, SimulatedStage] = {}
        self._workers: dict[PeerId, Replica] = {}
        self._transfers = Transfers()
        self._clusters = AveragingClusters()
        self._expected = ExpectedStep()
        self._forecast_of: tuple[PeerId, ...] = ()
        self._forecast_s = 0.0  # forecast for these stages
        self._coming: list[Peer] = []
        self._flights: dict[int, SimulatedMicrobatch] = {}
        self._ledger = StepLedger(0, world.model.units, range(settings.microbatches))
        self._machine = Coordination(Phase.STEPPING)  # state of the coordinator, or of the next one
        self._coordinator: PeerId | None = None
        self._turn = 0  # number of the candidacy or roll call; delayed actions of an older number are void
        self._attempt = 0  # number of the all-reduce, likewise
        self._reducing_since_s = 0.0
        self._uncovered = False  # some units had no holder, so training resumes from the last checkpoint
        self._step_began_s = 0.0
        self._last_step_s = 0.0
        self._seen: dict[int, int] = {}  # unit -> bit mask of the microbatches counted in this step

    @property
    def has_learnt(self) -> bool:
        """Whether a step has been completed."""
        return self.step > 0

    def begin(self) -> None:
        """Begin the first step, with the peer that joined first as coordinator."""
        self._begin_step()
        self._coordinator = self._eldest()
        self._advance()

    def gauges(self) -> dict[str, float]:
        """Return the stages, microbatches under way and the duration of the last step for the curves."""
        return {
            "stages": len(self._stages),
            "microbatches under way": len(self._flights),
            "last step, s": self._last_step_s,
        }

    # -- peers

    def ready(self, peer: Peer) -> None:
        """Let `peer` take part from the next step or roll call on; at once if training has no coordinator."""
        self._coming.append(peer)
        if self._machine.phase is Phase.VACANT:
            self._admit()
            self._happen(Event.OUR_TURN)

    def leaving(self, peer: Peer) -> None:
        """Remove `peer`, which moves to other layers and says so; other peers repeat the work that it counted in this step."""
        self._coming = [other for other in self._coming if other is not peer]
        stage = self._stages.get(peer.peer)
        if stage is not None:
            stage.pass_queue.stop()
            self._notice(stage.name)

    def lost(self, peer: Peer) -> None:
        """Stop `peer`, which vanished; the coordinator notices `detect_s` seconds later."""
        self._coming = [other for other in self._coming if other is not peer]
        stage = self._stages.get(peer.peer)
        if stage is not None:
            stage.pass_queue.stop()
            self.clock.after(self.world.settings.detect_s, lambda: self._notice(stage.name))

    def _notice(self, name: PeerId) -> None:
        """Call back the microbatches that pass the lost peer `name`; its counted work is missing again."""
        del self._stages[name], self._workers[name]
        for flight in [flight for flight in self._flights.values() if flight.passes(name)]:
            self._call_back(flight)
        mine = self._ledger.holdings.get(name)
        masks = {} if mine is None else mine.masks
        self.world.measures.count("lost, unit microbatches", sum(mask.bit_count() for mask in masks.values()))
        self._ledger.lose(name)
        self._attempt += 1
        if self._machine.phase is Phase.REDUCING:
            self.world.links.drop_waiting(self.clock.now_s)  # only the all-reduce is under way in this phase
            self._happen(Event.DISAGREED)
        if name == self._coordinator:
            # The peer that joined first among the remaining stages replaces it; without stages a newcomer does.
            self.world.measures.count("coordinators lost", 1)
            self._coordinator = None
            self._machine = Coordination(Phase.FOLLOWING)
            self._turn += 1
            self._happen(Event.DESERTED)
            if self._stages:
                self._happen(Event.OUR_TURN)
        self._advance()

    def _call_back(self, flight: SimulatedMicrobatch) -> None:
        flight.called_back = True
        self._book(flight, -1)
        del self._flights[flight.number]
        for index in flight.counted:
            self._count(flight, index)

    # -- coordinator and phase (`plan/training/coordination.py`)

    def _eldest(self) -> PeerId | None:
        eldest = min(self._stages.values(), key=lambda stage: (stage.peer.started_at, stage.name), default=None)
        return None if eldest is None else eldest.name

    def _advance(self) -> None:
        """Handle all events that are due, and lease microbatches while a step runs."""
        while (event := self._machine.due(self._has_come)) is not None:
            self._happen(event)
        if self._machine.phase is Phase.STEPPING:
            self._dispatch()

    def _has_come(self, event: Event) -> bool:
        if event is Event.COUNTED:
            return self._ledger.complete() and not self._flights
        return event is Event.UNCOVERED and self._missing_units()

    def _happen(self, event: Event) -> None:
        does = {
            Action.SETTLE: lambda: self._in_turn(SETTLE_S, lambda: self._happen(Event.SETTLED)),
            Action.CALL_ROLL: self._call_roll,
            Action.GATHER: self._gather,
            Action.LEASE: self._dispatch,
            Action.REDUCE: self._reduce,
            Action.COMMIT: self._commit,
        }
        for action in self._machine.on(event):
            does[action]()

    def _in_turn(self, seconds: float, does: Callable[[], None]) -> None:
        """Call `does` after `seconds`, unless this function is called again before (for a candidacy or a roll call)."""
        turn = self._turn = self._turn + 1
        self.clock.after(seconds, lambda: does() if self._turn == turn else None)

    def _call_roll(self) -> None:
        """Make the peer that joined first the coordinator, call back all microbatches, and look at the stages a round trip
        later."""
        self._coordinator = self._eldest()
        for flight in list(self._flights.values()):
            self._call_back(flight)
        self._in_turn(self._coordinator_rtt_s(), self._check_layers)

    def _check_layers(self) -> None:
        """Continue if the stages, newcomers included, hold all layers; else look again after `MISSING_RETRY_S`."""
        self._admit()
        if self._missing_units():
            self._uncovered = True
            self.world.measures.count("waiting for units, s", MISSING_RETRY_S)
            self._in_turn(MISSING_RETRY_S, self._check_layers)
            return
        self._happen(Event.GATHERED)
        self._advance()

    def _gather(self) -> None:
        """Resume the step with the work already counted; if layers had no holder, resume from the last checkpoint."""
        if self._uncovered:
            kept = self.step // self.settings.checkpoint_steps * self.settings.checkpoint_steps
            self.world.measures.count("steps lost", self.step - kept)
            self.step, self._uncovered = kept, False
            self._begin_step()
        for name, stage in self._stages.items():
            if name not in self._ledger.holdings:
                self._ledger.report(name, stage.peer.span, {})

    # -- a step

    def _begin_step(self) -> None:
        self._admit()
        self._step_began_s = self.clock.now_s
        self._seen = {}
        self._ledger = StepLedger(self.step, self.world.model.units, range(self.settings.microbatches))
        for name, stage in self._stages.items():
            self._ledger.report(name, stage.peer.span, {})
        if self._pipelines:
            named = [[self.world.peers[index].peer for index in pipeline] for pipeline in self._pipelines]
            beats_s = [beat_s(pipeline, self._workers) for pipeline in named]
            self._pipeline_of = share_out(self.settings.microbatches, beats_s)
        self.encoder.begin_step(
            max((worker.span.units * worker.unit_s for worker in self._workers.values()), default=0.0)
        )
        # Forecast the step's duration as the coordinator does, anew if the stages have changed.
        stages = tuple(self._workers)
        if stages != self._forecast_of:
            self._forecast_of, self._forecast_s = stages, self._forecast() if stages else 0.0
        self._expected.begin(self._forecast_s)

    def _forecast(self) -> float:
        units, count = self.world.model.units, self.settings.microbatches
        forecast_s = passing_s(units, self._workers, self._transfers, count)
        groups = [one for one in self._averaging_groups(lambda _peer, _units: 1) if one.group.how != How.APART]
        shared = [one for one in groups if len(one.group.members) > 1]
        agreeing_s = max(averaging_s(name, shared) for name in self._stages)
        return forecast_s + agreeing_s

    def _admit(self) -> None:
        model = self.world.model
        for peer in self._coming:
            device = peer.device
            bench = PassQueue(self.clock, peer.computes)
            stage = SimulatedStage(peer, peer.peer, bench, peer.life, lambda s, d=device: d.layers(model, s))  # type: ignore[misc]
            layers, tokens = stage.layers(peer.span), self.settings.tokens
            there_and_back_s = device.prompt_s(layers, tokens) + device.backward_s(layers, tokens)
            self._stages[stage.name] = stage
            self._workers[stage.name] = Replica(peer.span, there_and_back_s / peer.span.units)
        self._coming = []
        # Update the transfer times between the stages, from the links and the current size of messages.
        indexes = [stage.peer.index for stage in self._stages.values()]
        delay_NN, bandwidth_NN = self.world.links.between(indexes)
        values = (self.settings.microbatch, self.settings.sequence, self.world.model.hidden)
        size_NN = self.encoder.expected_bytes(indexes, values)
        self._transfers.know(list(self._stages), delay_NN, 8 * size_NN / bandwidth_NN)
        set_at_once(self.world.model.units, self._workers, self._transfers)

    def _missing_units(self) -> bool:
        held = {unit for worker in self._workers.values() for unit in range(*worker.span)}
        return len(held) < self.world.model.units

    def _dispatch(self) -> None:
        """Lease every microbatch that is neither counted nor leased, while stages have room
        (`training/coordinator/dispatcher.py`)."""
        missing = [number for number in self._ledger.missing() if number not in self._flights]
        for given, number in enumerate(missing):
            fixed, left = self._fixed(number), len(missing) - given
            route = wire(self._workers, fixed, self._transfers, left=left)
            if route is None:
                if self._pipelines:
                    continue  # its own pipeline is full, another's may not be
                return
            flight = SimulatedMicrobatch(self, number, [(self._stages[name], span) for name, span in route])
            self._flights[number] = flight
            self._book(flight, 1)
            flight.start(len(self.world.peers))

    def _fixed(self, number: int) -> list[PeerId | None]:
        """Return for each layer the peer that microbatch `number` must pass: the peer that has counted it, else its pipeline's
        live stage, else None."""
        fixed = self._ledger.counters(number)
        if self._pipelines:
            for index in self._pipelines[self._pipeline_of[number]]:
                peer = self.world.peers[index]
                if peer.peer in self._workers:
                    fixed[peer.span.start : peer.span.end] = [
                        counted or peer.peer for counted in fixed[peer.span.start : peer.span.end]
                    ]
        return fixed

    def _book(self, flight: SimulatedMicrobatch, sign: int) -> None:
        book([(stage.name, span) for stage, span in flight.route], self._workers, self._transfers, sign)

    def _count(self, flight: SimulatedMicrobatch, index: int) -> None:
        """Record that hop `index` has counted `flight`, and measure the layers that had been counted before as replayed."""
        stage, span = flight.route[index]
        self._ledger.count(stage.name, span, flight.number)
        again = 0
        for unit in range(*span):
            mask = self._seen.get(unit, 0)
            again += mask >> flight.number & 1
            self._seen[unit] = mask | 1 << flight.number
        if again:
            self.world.measures.count("replayed, unit microbatches", again)

    def done(self, flight: SimulatedMicrobatch) -> None:
        """Count `flight`, whose gradient is back at the first hop, at all its hops."""
        del self._flights[flight.number]
        self._book(flight, -1)
        for index in range(len(flight.route)):
            self._count(flight, index)
        self._advance()

    # -- end of a step

    def _reduce(self) -> None:
        self._attempt += 1
        self._clusters.begin()
        groups = [one.group for one in self._averaging_groups(self._ledger.counts)]
        began_s, attempt = self.clock.now_s, self._attempt
        ends_s = reduction_ends_s(
            began_s, groups, self._indexes, self.world.links, self.world.model, self.settings.averaging
        )
        self._reducing_since_s = began_s
        self.clock.at(ends_s + self._coordinator_rtt_s(), lambda: self._agree() if self._attempt == attempt else None)

    @property
    def _indexes(self) -> dict[PeerId, int]:
        return {name: stage.peer.index for name, stage in self._stages.items()}

    def _averaging_groups(self, count: Count) -> list[ClusteredGroup]:
        links, model, averaging = self.world.links, self.world.model, self.settings.averaging
        holders = [
            Holder(name, stage.peer.span, line_bps=links.uplink_bps(stage.peer.index))
            for name, stage in self._stages.items()
        ]
        return [
            self._clusters.choose(
                group,
                averaging_network(group, self._indexes, links),
                vector_bytes(group, model, averaging),
                allowed=may_cluster(averaging),
            )
            for group in make_groups(model.units, self._run, self.step, holders, count)
        ]

    def _agree(self) -> None:
        self._happen(Event.AGREED)
        self._advance()

    def _coordinator_rtt_s(self) -> float:
        """Return the seconds of a round trip between the coordinator and its farthest stage; 0 if the coordinator is lost."""
        if self._coordinator not in self._stages:
            return 0.0
        centre = self._stages[self._coordinator].peer.index
        others = [stage.peer.index for stage in self._stages.values() if stage.peer.index != centre]
        return 2 * max((self.world.links.delay_s(centre, other) for other in others), default=0.0)

    def _commit(self) -> None:
        measures, now_s = self.world.measures, self.clock.now_s
        self._last_step_s = now_s - self._step_began_s
        measures.record("step, s", self._last_step_s)
        measures.record("of it agreeing, s", now_s - self._reducing_since_s)
        if self._expected.expected_s:
            measures.record("off its forecast, share", abs(self._last_step_s / self._expected.expected_s - 1))
        self._expected.end(self._last_step_s)
        measures.count("steps", 1)
        measures.count(f"{self.world.model.counted} trained", self.settings.microbatches * self.settings.tokens)
        self.step += 1
        self._begin_step()
