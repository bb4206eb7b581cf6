"""Node: a volunteer's machine in a swarm, from joining to leaving.

join -> choose a span -> get the weights -> load -> serve -> drain -> leave
             ^-------------- move, when layers lack a holder -----'
                                                 pause <-'  '-> go on

The owner's commands and rules can pause or finish the node, see `lending`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from swarmnode.codec.body import VERSION
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.config import OWN
from swarmnode.counting import counted, format_bytes, layers
from swarmnode.credit.receipts import ReceiptKeeper
from swarmnode.errors import LocalError, SwarmnodeError, UsageError
from swarmnode.lending.cards import CardGuard, Cards, EnergyMeter
from swarmnode.lending.lending import Keep, Lending, LendingEvent, LendingState
from swarmnode.lending.rule_watch import follow_rules
from swarmnode.measuring.bandwidth import Prober
from swarmnode.measuring.service_report import Donation, ServiceReporter, WorkRecord
from swarmnode.metrics import table
from swarmnode.metrics.metric import Figures, Reading, Readings
from swarmnode.net.tasks import cancel_and_wait, until_first
from swarmnode.node.description import Tell, described, measured
from swarmnode.node.node_config import RATES, NodeConfig
from swarmnode.node.stage_loader import CrashLog, StageLoader
from swarmnode.peer.host import Host
from swarmnode.peer.placement import Placement, PlannedPlace
from swarmnode.peer.swarm_status import explain
from swarmnode.plan.view import Span
from swarmnode.platform import MACHINE, Platform
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import Place, State
from swarmnode.swarm.records.manifest import CAUSAL_LM, GENERATE, TRAIN, Manifest
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from swarmnode.version import __version__
from swarmnode.weights.chunk_server import Seeder

if TYPE_CHECKING:
    from swarmnode.checkpoints.checkpoint_manager import SharedStates
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.measuring.hardware import Hardware
    from swarmnode.serving.span_part import RetainedSpan

log = logging.getLogger(__name__)

MANIFEST_PATIENCE_S = 3600.0  # a volunteer has time
REPORT_S = 60.0
CRASHES = "crashes"  # in the node's home: one file for each peer and swarm
DRAFT_FOLDER = "draft-model"  # in the node's home: the index of a GGUF file

COMPUTED = (table.UNIT_TOKENS, table.ANSWERS)  # not zero after a completed pass
NO_LONGER_FINISHING = (LendingState.RUNNING, LendingState.DRAINING)
STANDS_BY = "Standing by: training is faster without this node at the moment. It takes layers as soon as some need it."
LENDING = {
    LendingState.DRAINING: "Pausing ({reason}): running work moves to other machines.",
    LendingState.FINISHING: "Finishing ({reason}): this machine accepts no new work.",
    LendingState.PAUSED: "Paused ({reason}).",
}


def _ignore(_event: str, _text: str, **_details: object) -> None:
    """Discard an event."""


class Node:
    """Node of one volunteer. `run` covers its whole life; `tell` receives its news for people and scripts.

    `run` joins by the addresses in `swarm`, which its host can renew before.
    """

    def __init__(
        self,
        swarm: Swarm | str | Path,
        config: NodeConfig | None = None,
        tell: Tell = _ignore,
        *,
        platform: Platform = MACHINE,
    ) -> None:
        """Prepare a node; nothing runs yet.

        Args:
            swarm: A swarm, a .swarm file, an invite, or the name of a joined, founded or public swarm.
            config: What the node lends; the default is most of the machine.
            tell: Called with (event, text for people, details by name).
            platform: Network, executor and clocks.

        Raises:
            UsageError: If `swarm` is none of these.
        """
        self.config = config = config or NodeConfig()
        self.platform = platform
        self.swarm = swarm if isinstance(swarm, Swarm) else load_swarm(swarm, config.host.home)
        self._stopping = asyncio.Event()
        self._life: asyncio.Task[None] | None = None  # after `start`
        self._tell = tell
        self._host: Host | None = None
        self._receipts: ReceiptKeeper | None = None
        self._executors: list[Executor] = []  # one per device
        self._states: SharedStates | None = None  # None unless the swarm trains
        self._stage: Stage | None = None
        self._span: Span | None = None
        self._planned: PlannedPlace | None = None
        self._retained: RetainedSpan | None = None  # during a pause
        self._moves = 0
        self._donation: Donation | None = None  # of this home's nodes, at the last look
        self.lending = Lending(self._tell_lending, now=platform.clock.unix, clock=platform.clock.monotonic)
        self.lending.follow(config.rules)
        self._card_limits = config.card
        self._rates: dict[str, float] = {}  # limits that `follow` has changed
        self._guard: CardGuard | None = None  # None until the devices are known, as the hardware
        self._hardware: Hardware | None = None
        self._crashes: CrashLog | None = None  # None until the model is known, and if nothing is logged

    def __repr__(self) -> str:
        return f"<Node {self._host!r} {self._stage!r}>"

    @property
    def has_joined(self) -> bool:
        """Whether the node has joined the swarm as a peer."""
        return self._host is not None

    # -- for Python programs

    async def __aenter__(self) -> Node:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to run in a task of this event loop. A second call does nothing."""
        if self._life is None:
            self._life = asyncio.ensure_future(self.run(self._stopping))

    async def wait_until_serving(self) -> None:
        """Wait until the node serves or trains, or stands by. Raises the error that ended it, and LocalError if it was stopped."""
        self.start()
        assert self._life is not None
        await until_first(self.lending.until(LendingState.RUNNING), asyncio.wait([self._life]))
        if self._life.done():
            self._life.result()
            raise LocalError("the node was stopped before it served; start it again")

    def pause(self, reason: str = "by its program", *, keep: Keep = Keep.DISK) -> None:
        """Let sessions move to other peers, then give back the device and its memory. `keep` says where the weights stay."""
        self.lending.pause(reason, keep=keep)

    def resume(self) -> None:
        """Lend again after `pause`. Rules (hours, load, …) still apply."""
        self.lending.resume()

    async def stop(self) -> None:
        """Let sessions move away, leave the swarm and wait for the end. Raises the error that ended the node earlier."""
        self._stopping.set()
        if self._life is not None:
            life, self._life = self._life, None
            await life

    def readings(self) -> Readings:
        """Yield the node's metrics. Before it has joined these are only its moves and the lending state."""
        yield Reading(table.MOVES, self._moves)
        yield from self.lending.readings()
        for source in (self._host, self._receipts, self._stage):
            if source is not None:
                yield from source.readings()

    def describe(self) -> dict[str, Any]:
        """Return a short description for the owner: swarm, peer, span, sessions, device, limits and work done."""
        own = None if self._host is None else self._host.directory.own
        # Settings as they are now, after the changes that a running node can make
        host = replace(self.config.host, **self._rates)  # type: ignore[arg-type]  # all rates are numbers
        in_force = replace(self.config, host=host, rules=self.lending.rules, card=self._card_limits)
        facts = described(self.swarm, in_force, self._host, self._span, self._donation, self.readings())
        return {**facts, **measured(self._hardware, own)}

    def why(self, about: str = "") -> dict[str, Any]:
        """Return facts and decisions about `about`: a peer, a layer or a session; this node itself if it is empty.

        Before the node has joined there are no facts, and only decisions about lending.
        """
        decisions = self.lending.decisions.about()
        if self._host is None:
            return {"facts": [], "decisions": [decision.to_json() for decision in decisions]}
        return explain(self._host, about, decisions)

    def follow(self, config: NodeConfig) -> list[str]:
        """Apply the rules, rate limits and ceilings of cards in `config`. Returns the names of other settings that differ and need
        a restart."""
        self.lending.follow(config.rules)
        self._card_limits = config.card
        if self._guard is not None:
            self._guard.follow(config.card)
        for name in RATES:
            if getattr(self.config.host, name) and getattr(config.host, name):
                self._rates[name] = getattr(config.host, name)
        if self._host is not None:
            self._host.limit(config.host.max_upload_bps, config.host.max_download_bps)
        return self.config.fixed(config)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then let the sessions move to other peers and leave.

        Raises LocalError (also if a part of the node dies of a bug), NetworkDown, CheckpointError, NotAdmitted; ExecutorDied if
        the node can no longer compute.
        """
        async with AsyncExitStack() as closing:  # closes each in its turn, even if closing another was interrupted
            heavy = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, "swarmnode.serving.serving_stage"))
            closing.push_async_callback(cancel_and_wait, heavy)
            threads = [self.config.stage.threads]  # one count per device
            if self.config.stage.device not in ("auto", "cpu"):
                # Fail on a missing card before other peers hear of this node.
                await heavy
                from swarmnode.measuring.hardware import threads_of_devices

                threads = await asyncio.to_thread(threads_of_devices, self.config.stage)
            host = self._host = await Host.join(self.swarm, self.config.host, platform=self.platform)
            closing.push_async_callback(host.close)
            for count in threads:
                executor = self.platform.start_executor(count)
                closing.push_async_callback(executor.close)
                self._executors.append(executor)
            services = await closing.enter_async_context(AsyncExitStack())
            closing.push_async_callback(self._close_stage)
            record = await asyncio.to_thread(WorkRecord, self.config.host.home, host.peer_id, host.swarm, self.readings)
            living = asyncio.ensure_future(self._live(host, heavy, services))
            closing.push_async_callback(cancel_and_wait, living)
            await self._until(stop, living, host, record)
            await cancel_and_wait(living)  # else it would look for another span during the leaving
            if self._stage is not None:
                self._tell(
                    "draining", "Leaving: running work moves to other machines. Press Ctrl-C again to leave now."
                )
                await self._leave_stage(host)
            if self._crashes is not None:
                self._crashes.forget()
            donation = await asyncio.to_thread(record.store, record.run_sums())
            gave = f"So far this machine gave {donation}. " if donation.any else ""
            self._tell("left", f"Left the swarm. {gave}Thank you.", given=donation.to_json())

    async def _until(self, stop: asyncio.Event, living: asyncio.Task[None], host: Host, record: WorkRecord) -> None:
        """Wait until the node is to leave. Raises the error of anything that ends earlier."""
        stopped = asyncio.ensure_future(until_first(stop.wait(), self.lending.finished()))
        rules = follow_rules(
            self.lending,
            host.config.home,
            lambda: host.link_config.traffic.total_bytes,
            notify=self.config.notify,
            clock=self.platform.clock.monotonic,
        )
        watched = host.wait_turned_away(), self._report(host, record), rules
        watching = [asyncio.ensure_future(one) for one in watched]
        broken = asyncio.ensure_future(host.supervisor.broken())
        deaths: list[asyncio.Future[Any]] = [*(executor.died for executor in self._executors), broken]
        endings: set[asyncio.Future[Any]] = {living, stopped, *watching, *deaths}
        try:
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            for death in deaths:
                if death.done():
                    raise death.result()
            for ended in (living, *watching):
                if ended.done():
                    # An unexpected error may come from a lost device: then ExecutorDied says so.
                    error = ended.exception()
                    if isinstance(error, Exception) and not isinstance(error, SwarmnodeError):
                        for executor in self._executors:
                            await executor.check_device(error)
                    ended.result()
        finally:
            await cancel_and_wait(stopped, *watching, broken)

    async def _live(self, host: Host, heavy: asyncio.Future[ModuleType], services: AsyncExitStack) -> None:
        """Join the swarm, load layers, and serve or train, with moves and pauses, until cancelled."""
        yielding = asyncio.ensure_future(self._yield_at_once())
        try:
            loader, place = await self._prepare(host, heavy, services)
        finally:
            await cancel_and_wait(yielding)
        from swarmnode.compute.device import free_memory

        while True:
            if self.lending.state is not LendingState.PAUSED:
                await until_first(self._work(host, loader, place), self._held(host))
            # Give back all that the node holds, and wait until it may lend again.
            stage, keep_span = self._stage, self.lending.keep is Keep.MEMORY
            await self._leave_stage(host, keep_span=keep_span)
            if stage is not None and keep_span:
                self._retained = await asyncio.to_thread(stage.retain, host.link_config.ledger)
            del stage
            host.directory.announce(Place(state=State.PAUSED, seeds=(0, 0)), await host.introduction())
            await asyncio.to_thread(free_memory)
            self.lending.happened(LendingEvent.DRAINED)
            await self.lending.until(LendingState.WAITING)

    async def _read_model(self, host: Host, services: AsyncExitStack) -> Manifest:
        """Wait for the swarm's first answer and return its manifest. From now on a crash counts against the model.

        Raises UsageError if the model has crashed too often, NetworkDown and ProtocolError as `Host.manifest`.
        """
        addresses = await host.network.addresses()
        known_as = f"{host.name} ({host.peer_id[-8:]})" if host.name else host.peer_id[-8:]
        text = f"This machine is {known_as} in {host.swarm.name}."
        self._tell("joined", text, peer=host.peer_id, addresses=addresses)
        if not host.joined.is_set():
            self._tell("waiting", f"Waiting for {host.swarm.name}: the host does not answer yet.")
            await host.joined.wait()
        await host.manifest(patience_s=MANIFEST_PATIENCE_S)
        manifest, stage = host.swarm.manifest, self.config.stage
        assert manifest is not None
        model, trains = manifest.model, manifest.mode == TRAIN
        ends = " with embedding and head" if manifest.kind == CAUSAL_LM else ""
        size = (
            f"{counted(model.units, 'layer')}{ends}, {format_bytes(manifest.total_bytes)}{', to be trained' * trains}"
        )
        self._tell("model", f"Model: {model.label}, {size}", **msgspec.to_builtins(model))
        # A crash counts for the same model, version and options that decide which code computes.
        options = stage.device, stage.dtype, stage.quantize, stage.products, stage.kv, stage.capture, stage.draft_model
        computed = f"{host.swarm.id.hex()} {__version__} {options!r}"
        path = self.config.host.home / CRASHES / f"{host.peer_id}-{host.swarm.id.hex()[:16]}.txt"
        self._crashes = await asyncio.to_thread(CrashLog.start, path, computed)
        if self._crashes is not None:
            services.callback(self._crashes.close)
        return manifest

    async def _prepare(
        self, host: Host, heavy: asyncio.Future[ModuleType], services: AsyncExitStack
    ) -> tuple[StageLoader, Placement]:
        """Start all services, probe the hardware and return the loader and the placement for the first span.

        `services` close after the sessions have moved away.
        """
        manifest = await self._read_model(host, services)
        trains = manifest.mode == TRAIN
        seeder = await Seeder.start(host, host.swarm)

        def needs_links() -> bool:
            """Return whether sessions or downloads need the links more than a bandwidth test does."""
            own = host.directory.own
            return own is not None and (own.sessions > 0 or own.life not in (State.READY, State.JOINING))

        prober = Prober(host, busy=needs_links)
        await heavy
        from swarmnode.measuring.hardware import StageResources
        from swarmnode.weights.adapter_files import AdapterFiles, BroughtAdapters
        from swarmnode.weights.weights import Weights

        weights = Weights(host)
        adapters = None
        if manifest.task == GENERATE and not trains:
            brought = BroughtAdapters(host, weights, seeder, self.config.stage.server)
            services.push_async_callback(brought.close)
            adapters = AdapterFiles(host.swarm, weights, seeder, brought)
        energy = EnergyMeter.start(host.config.home, Cards, on_crash=host.supervisor.ends_peer)
        receipts = self._receipts = await asyncio.to_thread(ReceiptKeeper, host)
        for service in (weights, seeder, prober, energy, receipts):
            services.push_async_callback(service.close)
        await receipts.start()
        if adapters is not None:
            await adapters.brought.start()
        await prober.start(host.directory.peers)
        if trains:
            from swarmnode.checkpoints.checkpoint_manager import SharedStates

            self._states = await SharedStates.start(host)
            services.push_async_callback(self._states.close)
        hardware = await self._probe(host, await weights.outline(), manifest, services)
        if trains:
            from swarmnode.training.organisation import training_placement

            place = training_placement(host, hardware, self.config.place)
        else:
            place = Placement(host, hardware.capacity_units, self.config.place, room=hardware.experts_in_memory)
        workplace = StageResources(host, hardware, self._executors, adapters)
        loader = StageLoader(workplace, seeder, weights, self._states, self._tell, place.awaits_others)
        return loader, place

    async def _probe(self, host: Host, outline: Checkpoint, manifest: Manifest, services: AsyncExitStack) -> Hardware:
        """Find what the devices can do for the model with this `outline`, guard the cards, and tell the owner.

        Raises UsageError if a draft model does not go with the swarm's model, CheckpointError if it cannot be read, ExecutorDied.
        """
        from swarmnode.measuring.hardware import Hardware

        trains = manifest.mode == TRAIN
        probe = partial(Hardware.probe, trains=trains, host=host.link_config.ledger, clock=host.clock)
        stage, draft = self.config.stage.meeting(manifest.products or ""), None
        if stage.draft_model and trains:
            raise UsageError("--draft-model: a swarm that trains writes no texts: leave the option out")
        if stage.draft_model not in ("", OWN):
            from swarmnode.measuring.draft_part import open_draft

            index = self.config.host.home / DRAFT_FOLDER
            draft = await asyncio.to_thread(open_draft, stage.draft_model, index, outline)
        needed = self.config.span and self.config.span.units
        if needed is None:  # layers that no other machine holds
            others = [peer for peer in host.directory.peers().values() if peer.peer != host.peer_id]
            needed = sum(not any(peer.holds(unit) for peer in others) for unit in range(manifest.model.units))
        hardware = self._hardware = await asyncio.to_thread(probe, outline, stage, draft=draft, needed_units=needed)
        paced = [lent.throttle for lent in hardware.lent]
        self._guard = CardGuard.start(self._card_limits, paced, Cards, on_crash=host.supervisor.ends_peer)
        services.push_async_callback(self._guard.close)
        for executor, lent in zip(self._executors, hardware.lent, strict=True):
            await executor.call(Urgency.CONTROL, lent.device.use, kind="use the device")
        machine = hardware.machine(self.config.host.home)
        found = f"This machine: {hardware.description}, {machine['cpu_cores']} cores; {hardware.holds}"
        self._tell("machine", found, **machine)
        if hardware.tier is not None:
            self._tell(
                "experts", f"Experts: {hardware.tier}. {hardware.tier.others}".rstrip(". "), **hardware.tier.facts()
            )
        if hardware.advice:
            self._tell("advice", hardware.advice, advice=hardware.advice)
        return hardware

    async def _work(self, host: Host, loader: StageLoader, place: Placement) -> None:
        """Hold the span that the swarm needs most, and move when another needs it more. Never returns; ends only by an error."""
        if self._span is None:
            hardware, fixed = loader.place.hardware, self.config.span
            if fixed is None and self.config.plan is not None:
                self._planned = PlannedPlace(self.config.plan, host)
                fixed = self._planned.span
            if fixed and fixed.units:
                self._span = hardware.check(fixed)
            else:
                self._span = await place.claim(*hardware.sections(host), await host.introduction())
        while True:
            if self._span.units:
                await self._serve(host, loader, self._span)
            else:
                host.directory.announce(Place(state=State.JOINING, span=self._span))
                self._tell("spare", STANDS_BY)
            self.lending.happened(LendingEvent.LOADED)
            place.arrived()
            stage = self._stage
            if stage is None:
                move = await place.reason_to_move(bound=self._bound, news=tuple)
            else:
                work = stage.sections, stage.rest_s, stage.settled
                move = await place.reason_to_move(self._bound, *work)
            reason = f"With this node at {layers(*move.span)} the swarm is {move.gain:.0%} faster: moving there"
            if not move.span.units:
                reason = "Training is faster without this node at the moment: it gives up its layers and stands by"
            elif move.fills:
                reason = f"No machine has {layers(*move.span)}: moving there"
            self._tell("moving", reason, span=list(move.span), gain=None if move.fills else move.gain)
            self._moves += 1
            self.lending.happened(LendingEvent.MOVED)
            await self._leave_stage(host)
            self._span = move.span

    async def _report(self, host: Host, record: WorkRecord) -> None:
        """Tell the owner the node's news every `REPORT_S` seconds, and once each newer protocol version that peers speak; write
        what the node has given into `record`. Never ends."""
        reporter, since, told = ServiceReporter(self.readings), self.platform.clock.unix(), None
        while True:
            await asyncio.sleep(REPORT_S)
            newer = host.link_config.peer_versions.newer
            if newer is not None and newer != told:
                advice = (
                    f"Most machines of this swarm have a newer swarmnode (protocol version {newer}, here {VERSION}). "
                    "`swarmnode doctor --update` shows how to upgrade."
                )
                self._tell("outdated", advice, version=VERSION, newer=newer)
                told = newer
            peers = {peer: one for peer, one in host.directory.peers().items() if peer != host.peer_id}
            report = reporter.report(host.paths.reachability, peers, since)
            if self._crashes is not None and any(map(Figures(self.readings()).sum, COMPUTED)):
                self._crashes.forget()
            if report is not None:
                self._tell("report", str(report), **asdict(report))
            self._donation = await asyncio.to_thread(record.store, record.run_sums())

    # -- placement

    def _bound(self) -> bool:
        """Return whether the node must stay: it finishes, its span is fixed or planned, or its stage is bound."""
        if self.lending.state is LendingState.FINISHING or self.config.span is not None:
            return True
        planned = self._planned is not None and self._planned.holds()
        return planned or (self._stage is not None and self._stage.bound)

    # -- serving

    async def _serve(self, host: Host, loader: StageLoader, span: Span) -> None:
        """Get the weights of `span`, load them, and take requests from now on."""
        hardware = loader.place.hardware
        host.directory.announce(
            Place(state=State.LOADING, span=span), *hardware.sections(host), await host.introduction()
        )
        self._tell("loading", f"Loading {hardware.describe(span)}", span=list(span))
        if self._crashes is not None:
            self._crashes.record(f"it held {layers(*span)}")
        if self._retained is not None and self._retained.units == span:
            kept, self._retained = self._retained, None
            self._stage = await loader.restore(kept)
        else:
            self._stage = await loader.load(span)
        host.directory.announce(Place(state=State.READY, seeds=loader.seeder.units), *self._stage.sections())
        doing = "Training" if hardware.trains else "Serving"
        self._tell("ready", f"{doing} {layers(*span)} on {hardware.device_name}. Ctrl-C leaves.", span=list(span))

    # -- pausing

    async def _yield_at_once(self) -> None:
        """Complete pauses at once while no span is held yet. Never ends."""
        while True:
            await self.lending.until(LendingState.DRAINING)
            self.lending.happened(LendingEvent.DRAINED)

    async def _held(self, host: Host) -> None:
        """Wait until the node must pause, or has finished its work as asked."""
        while True:
            await self.lending.until(LendingState.DRAINING, LendingState.FINISHING)
            if self.lending.state is LendingState.DRAINING or await self._finish(host):
                return

    async def _finish(self, host: Host) -> bool:
        """Finish the running work. Returns True when it is done or a pause cuts it short, False if the node resumes meanwhile."""
        stage = self._stage
        if stage is None:
            return True  # a standby node runs nothing
        host.directory.announce(Place(state=State.DRAINING))
        await until_first(stage.finish(), self.lending.until(*NO_LONGER_FINISHING))
        if self.lending.state is not LendingState.RUNNING:
            return True
        stage.reopen()
        host.directory.announce(Place(state=State.READY))
        return False

    def _tell_lending(self, state: LendingState, reason: str) -> None:
        if state in LENDING:
            self._tell(state.value, LENDING[state].format(reason=reason), reason=reason)

    # -- leaving

    async def _leave_stage(self, host: Host, *, keep_span: bool = False) -> None:
        if self._stage is not None:
            host.directory.announce(Place(state=State.DRAINING))
            await self._stage.drain(self.config.stage.server.drain_s)
            await self._close_stage(keep_span=keep_span)

    async def _close_stage(self, *, keep_span: bool = False) -> None:
        if self._stage is not None:
            await self._stage.close(keep_span=keep_span)
            self._stage = None
        if self._retained is not None:
            self._retained.release()
            self._retained = None
