"""Tuning server: keeps adapters of other peers on this node's layers, within quotas and the memory ledger.

Tuning stage: a serving stage whose layers also tune adapters of other peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import SPARSE_CODECS
from swarmnode.codec.tuning_messages import TUNE_PROTOCOL, JoinAdapter, OpenAdapter
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.compute.training.adapters.layers import check_targets, linear_layers
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, ExecutorDied, ProtocolError, UsageError
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.links.switchboard import Channel
from swarmnode.measuring.hardware import StageResources
from swarmnode.measuring.meters import TRAIN, StageMeter
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.fair_share import FairPace, FairShare, Pace
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.questions import LocalPeer, board_of
from swarmnode.plan.view import Span
from swarmnode.serving.serving_stage import ServingStage
from swarmnode.serving.session.session_memory import BUSY_WEIGHT, Held, Shares
from swarmnode.serving.span_part import RetainedSpan
from swarmnode.serving.stage import Stage
from swarmnode.swarm.records.announcement import Section, TuningOffer
from swarmnode.swarm.records.manifest import PRIVATE, SERVING_CODECS, Manifest
from swarmnode.tuning.adapter_parts import AdapterParts, TuningDevice, TuningPace, check_parts, decode_recipe
from swarmnode.tuning.held_adapter import HeldAdapter, HopCodecs

ADAPTERS, ADAPTERS_OF_PEER = 16, 4
OPENINGS = Pace(per_s=0.2, at_once=4.0)  # of a peer; each computes the adapter's start
OPENINGS_OF_GROUP = Pace(per_s=0.8, at_once=16.0)
MODEST = 16  # payloads of all adapters may always take this part of the memory beside the weights
MOST_WAIT_S = 60.0  # of an opening for its turn
WATCH_S = 5.0
TUNED = (
    "tuned "  # begins the name of an adapter in training among those of a span; no name of a swarm's adapter has spaces
)

log = logging.getLogger(__name__)


class _Payloads(NamedTuple):
    """Payloads of one adapter, as `Shares` count them."""

    claimant: Claimant
    total_bytes: int


class TuningServer:
    """Server of one span's layers for the adapters of other peers. `start` opens it, `close` ends it.

    An adapter is known by its owner's peer id, which the link has proved, and its own id. A previous hop names both, so an adapter
    that another owner has opened under the same id is another one. No other peer can feed, read or update it.
    """

    def __init__(
        self, peer: LocalPeer, devices: Sequence[TuningDevice], config: ServerConfig, codecs: frozenset[int]
    ) -> None:
        """Create a server for layers that lie on `devices`, one after another. `codecs` are those that the swarm allows."""
        self.draining = False
        self._peer = peer
        self._devices = devices
        self._config = config
        self._codecs = codecs - SPARSE_CODECS
        self.span = Span(devices[0].span.start, devices[-1].span.end)
        self._places: FairShare[object] = FairShare(ADAPTERS, of_peer=ADAPTERS_OF_PEER)
        self._adapters: dict[tuple[PeerId, bytes], HeldAdapter] = {}
        self._opening: set[tuple[PeerId, bytes]] = set()
        self._model_layers: Mapping[str, bool] | None = None  # `linear_layers` of the model, once they are asked for
        self._openings = FairPace(OPENINGS, OPENINGS_OF_GROUP, clock=asyncio.get_running_loop().time)
        self._tasks = Tasks("tuning server", on_crash=peer.link_config.supervisor.ends_conversation)
        self._endings = Tasks("adapters that end", on_crash=peer.link_config.supervisor.ends_conversation)
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching: asyncio.TimerHandle | None = None
        self.meter = StageMeter(self.span, TRAIN)
        self.switchboard = board_of(peer, TUNE_PROTOCOL, accept=self._accept, on_peer_lost=peer.lost_neighbour)

    @property
    def forgotten_s(self) -> float:
        """Seconds after which an owner that keeps this node waiting loses its adapter."""
        return self._config.forgotten_s

    @property
    def load(self) -> int:
        """Number of adapters that are kept here."""
        return len(self._adapters)

    def readings(self) -> Readings:
        """Yield the metrics of the passes and of the adapters."""
        yield from self.meter.readings()
        yield Reading(table.TUNED_ADAPTERS, self.load, (self.meter.label,))
        yield Reading(table.TUNING_SECONDS, sum(device.pace.busy_s for device in self._devices), (self.meter.label,))

    async def start(self) -> None:
        """Start to accept adapters of other peers."""
        await self.switchboard.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no new adapters, ask the owners to move theirs, and wait for that, at most `timeout_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.finish(), timeout_s)

    async def finish(self) -> None:
        """Take no new adapters, ask the owners to move theirs, and wait until the last one has gone."""
        self.draining = True
        for adapter in list(self._adapters.values()):
            adapter.drain()
        await self._idle.wait()

    def reopen(self) -> None:
        """Accept new adapters again after draining."""
        self.draining = False

    async def close(self) -> None:
        """End all adapters and links."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        await self._tasks.close()
        for adapter in list(self._adapters.values()):
            adapter.end(Error(ErrorCode.DRAINING))
        await self._endings.idle()
        await self._endings.close()
        await self.switchboard.close()

    # -- services for adapters

    def ended(self, adapter: HeldAdapter) -> None:
        """Free the place of an adapter that has ended."""
        self._places.leave(adapter.place)
        self._endings.spawn(adapter.close(), "end an adapter")
        key = (adapter.owner, adapter.opened.adapter)
        if self._adapters.get(key) is adapter:
            del self._adapters[key]
        if not self._adapters:
            self._idle.set()

    def record_pass(self, phase: str, seconds: float, adapter: HeldAdapter) -> None:
        """Count a pass of one microbatch, which took `seconds` with its waiting."""
        units = adapter.hop.end - adapter.hop.start
        tokens = adapter.positions
        self.meter.record_hop(phase, seconds)
        self.meter.record_pass(phase, seconds, microbatches=1, tokens=tokens, unit_tokens=units * tokens)

    def make_room(self, adapter: HeldAdapter) -> bool:
        """End adapters of owners that hold more than this one's owner, for a pass of it. Returns False if there are none."""
        return self.give_way(adapter.claimant, adapter.pass_bytes)

    def give_way(self, asker: Claimant, asked_bytes: int, beside: Sequence[Held] = ()) -> bool:
        """End adapters for `asked_bytes` of an asker, in max-min fairness as sessions share memory (`serving/session`).

        `beside` is what else is held for the asker and others. The memory is free once the devices' threads have let go of the
        adapters. Returns False, and ends none, if no owner holds more than the asker with these bytes.
        """
        held, freed_bytes = Shares([*beside, *self._adapters.values()]), 0
        while freed_bytes < asked_bytes and self._adapters:
            excess_bytes = {
                one: held.excess_bytes(one.claimant, asker, BUSY_WEIGHT if one.is_computing else 1, asked_bytes)
                for one in self._adapters.values()
            }
            largest = max(excess_bytes, key=lambda one: (excess_bytes[one], one.total_bytes))
            if excess_bytes[largest] <= 0:
                break
            held.subtract(largest)
            freed_bytes += largest.total_bytes
            largest.end(Error(ErrorCode.BUSY, self._config.retry_s))
        return freed_bytes > 0

    def limit_payloads(self) -> None:
        """End adapters of the owners with most payloads, as long as payloads of adapters take more memory than they leave free."""
        ledger = self.switchboard.ledger
        if ledger.limit_bytes is None:
            return
        modest_bytes = (ledger.limit_bytes - ledger.accounts()[Account.WEIGHTS]) / MODEST
        total_bytes = sum(one.payload_bytes for one in self._adapters.values())
        free_bytes = ledger.free_bytes
        while total_bytes > max(free_bytes, modest_bytes):
            held = Shares([_Payloads(one.claimant, one.payload_bytes) for one in self._adapters.values()])
            largest = max(self._adapters.values(), key=lambda one: (*held.size_bytes(one.claimant), one.payload_bytes))
            total_bytes -= largest.payload_bytes
            free_bytes += largest.payload_bytes
            largest.end(Error(ErrorCode.BUSY, self._config.retry_s))

    def bandwidth_bps(self, peer: PeerId) -> float | None:
        """Return the rate of large frames to a peer, at most that of this node's limit, in bits/s; None if it is unknown."""
        links = self._peer.link_config
        limit_bps = 0.0 if links.rate_limiter is None else links.rate_limiter.rate_bps
        return min((bps for bps in (limit_bps, links.link_statistics.up_bps_to(peer)) if bps > 0), default=None)

    # -- incoming conversations

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if isinstance(body, OpenAdapter):
            self._tasks.spawn(self._open_or_refuse(channel, body), "open an adapter")
        else:
            with self._refusing(channel):
                # The adapter that a previous hop feeds. Raises ProtocolError if no adapter of the owner expects the sender,
                # or if the sender names no owner and several do.
                if not isinstance(body, JoinAdapter):
                    raise ProtocolError("a conversation that does not begin with an adapter")
                expecting = [
                    adapter
                    for (owner, number), adapter in self._adapters.items()
                    if number == body.adapter
                    and body.owner in ("", owner)
                    and adapter.expects(channel.peer, body.epoch)
                ]
                if len(expecting) != 1:
                    raise ProtocolError(f"{len(expecting)} adapters here expect this peer", code=ErrorCode.NO_SESSION)
                joining = expecting[0]
                joining.join(channel)

    @contextlib.contextmanager
    def _refusing(self, channel: Channel) -> Iterator[None]:
        """Answer a conversation's first frame with an error code if the `with` block raises ProtocolError, Busy or ExecutorDied."""
        try:
            yield
        except (ProtocolError, Busy, ExecutorDied) as error:
            log.info("refused an adapter of %s: %s", channel.peer, error)
            retry_s = error.retry_s if isinstance(error, Busy) else 0.0
            code = ErrorCode.BUSY if isinstance(error, Busy) else error.code
            channel.close(Error(ErrorCode(code), retry_s))

    async def _open_or_refuse(self, channel: Channel, body: OpenAdapter) -> None:
        try:
            with self._refusing(channel):
                await self._open(channel, body)
        except Exception:  # such as out of memory on a card
            log.exception("an adapter of %s failed to open", channel.peer)
            channel.close(Error(ErrorCode.INTERNAL))

    async def _open(self, channel: Channel, body: OpenAdapter) -> None:
        """Keep an adapter for the sender. A newer epoch of the same adapter replaces the older one.

        Another owner's adapter gives up its place only for one that is ready. Raises ProtocolError if the adapter can never be had
        here, Busy if there is no room now.
        """
        recipe = self._check(body)
        key = (channel.peer, body.adapter)
        older = self._adapters.get(key)
        if older is not None and body.epoch <= older.opened.epoch:
            raise ProtocolError("a newer epoch of this adapter is open", code=ErrorCode.STALE)
        if key in self._opening:
            raise Busy("this adapter is being opened", retry_s=self._config.retry_s)
        of_peer = sum(peer == channel.peer for peer, _ in self._opening)
        if of_peer + self._places.held(channel.claimant) - (older is not None) >= ADAPTERS_OF_PEER:
            raise Busy("this owner has enough adapters here", retry_s=self._config.retry_s)
        wait_s = self._openings.wait_s(channel.claimant, within_s=MOST_WAIT_S)
        if wait_s > MOST_WAIT_S:
            raise Busy("this owner opens adapters too often", retry_s=wait_s)
        self._opening.add(key)
        try:
            await asyncio.sleep(wait_s)
            self._check_waited(channel)
            adapter_bytes = await asyncio.to_thread(self._check_recipe, body, recipe)
            if older is not None:
                older.end(Error(ErrorCode.STALE))
            place = object()
            try:
                parts = await self._parts(channel, body, recipe)
            except Full:
                if not self.give_way(channel.claimant, adapter_bytes):
                    raise
                parts = await self._parts(channel, body, recipe)
            try:
                self._check_waited(channel)
                self._make_place(place, channel.claimant)
            except (ProtocolError, Busy):
                parts.close()
                raise
        finally:
            self._opening.discard(key)
        adapter = self._adapters[key] = HeldAdapter(self, channel, body, parts, place, HopCodecs(body, self._codecs))
        self._idle.clear()
        self._watch()
        adapter.start()

    def _check_waited(self, channel: Channel) -> None:
        """Raise ProtocolError if the owner has gone or this node leaves, after a wait."""
        if not channel.open or self.draining:
            raise ProtocolError("the owner has gone, or this node leaves", code=ErrorCode.DRAINING)

    def _make_place(self, place: object, claimant: Claimant) -> None:
        """Take a place for a new adapter; the owner with most gives one up if all are taken. Raises Busy if there is none."""
        yielding = self._places.admit(place, claimant)
        if yielding is place:
            raise Busy("there is no place for more adapters", retry_s=self._config.retry_s)
        for adapter in [adapter for adapter in self._adapters.values() if adapter.place is yielding]:
            adapter.end(Error(ErrorCode.BUSY, self._config.retry_s))

    async def _parts(self, channel: Channel, body: OpenAdapter, recipe: AdapterRecipe) -> AdapterParts:
        """Make the adapter on this node's devices. Raises Full."""
        hop, size = body.route[body.index], (body.rows, body.positions)
        name = f"{TUNED}{channel.peer[-8:]} {body.adapter.hex()} {body.epoch}"
        return await AdapterParts.open(self._devices, Span(hop.start, hop.end), recipe, name, size)

    def _check(self, body: OpenAdapter) -> AdapterRecipe:
        """Return the recipe of an adapter. Raises ProtocolError if the adapter is not for this node, or this node leaves."""
        hop = body.route[body.index]
        if hop.peer != self._peer.network.peer_id:
            raise ProtocolError("the route does not lead here")
        if self.draining:
            raise ProtocolError("this node pauses or leaves", code=ErrorCode.DRAINING)
        if not self.span.start <= hop.start < hop.end <= self.span.end:
            raise ProtocolError("its layers are not here", code=ErrorCode.WRONG_SPAN)
        if body.codec not in self._codecs:
            raise ProtocolError("the swarm does not allow the codec", code=ErrorCode.INVALID_REQUEST)
        return decode_recipe(body.recipe)

    def _check_recipe(self, body: OpenAdapter, recipe: AdapterRecipe) -> int:
        """Return an adapter's bytes.

        Raises ProtocolError if it can never be had here: of layers that the model lacks, or larger than the memory.
        """
        hop, family = body.route[body.index], self._devices[0].span.family
        try:
            if self._model_layers is None:
                self._model_layers = linear_layers(family)
            check_targets(family, recipe, self._model_layers)
        except UsageError as error:
            raise ProtocolError(str(error), code=ErrorCode.INVALID_REQUEST) from error
        return check_parts(self._devices, Span(hop.start, hop.end), recipe)

    def _watch(self) -> None:
        """End adapters whose owners were silent for `forgotten_s`, while there are any."""
        if self._watching is None and self._adapters:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._expire_adapters)

    def _expire_adapters(self) -> None:
        self._watching, since_s = None, asyncio.get_running_loop().time() - self._config.forgotten_s
        for adapter in [adapter for adapter in self._adapters.values() if adapter.moved_s <= since_s]:
            adapter.end(Error(ErrorCode.BUSY, self._config.retry_s))
        self._watch()


PRIVATE_SHARE = 0.3  # where members know one another


def tune_share(asked: float | None, manifest: Manifest | None) -> float:
    """Return the share of a device's time for tuning: `asked` by the node's owner, else `PRIVATE_SHARE` in a private swarm."""
    if asked is not None:
        return asked
    return PRIVATE_SHARE if manifest is not None and manifest.membership == PRIVATE else 0.0


@dataclass(eq=False)
class TuningStage(Stage):
    """Serving stage with a tuning server beside it. Made by `beside`, ended by `close`."""

    serving: ServingStage
    tuning: TuningServer
    share: float

    def __repr__(self) -> str:
        return f"<TuningStage {self.tuning!r} beside {self.serving!r}>"

    @classmethod
    async def beside(cls, place: StageResources, serving: ServingStage, share: float) -> TuningStage:
        """Open the layers of `serving` to adapters of other peers, which take `share` of the time while sessions run."""
        manifest = place.host.swarm.manifest

        def serves() -> bool:
            return serving.server.load > 0

        devices = [
            TuningDevice(
                part.span, place.executors[part.device], TuningPace(place.executors[part.device], share, serves)
            )
            for part in serving.replicas[0]
        ]
        allowed = frozenset(SERVING_CODECS if manifest is None else manifest.codecs)
        server = TuningServer(place.host, devices, place.hardware.config.server, allowed)
        serving.server.share_memory(server.give_way)
        await server.start()
        return cls(serving, server, share)

    @property
    def bound(self) -> bool:
        """Whether these layers hold data that no other node has."""
        return self.serving.bound

    async def settled(self) -> None:
        """Wait until leaving would not lose work that is under way."""
        await self.serving.settled()

    def rest_s(self) -> float:
        """Return the seconds until the stage is of no more use."""
        return self.serving.rest_s()

    def sections(self) -> tuple[Section, ...]:
        """Return the serving stage's sections of the announcement, and the share for tuning."""
        percent = 0 if self.tuning.draining else max(1, round(100 * self.share))
        return (*self.serving.sections(), TuningOffer(tune_percent=percent))

    def readings(self) -> Readings:
        """Yield the metrics of sessions and of adapters."""
        yield from self.serving.readings()
        yield from self.tuning.readings()

    async def finish(self) -> None:
        """Take no new work, and wait until all sessions have ended and all adapters have moved."""
        await asyncio.gather(self.serving.finish(), self.tuning.finish())

    def reopen(self) -> None:
        """Accept new work again."""
        self.serving.reopen()
        self.tuning.reopen()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and let the present one move to other peers."""
        await asyncio.gather(self.serving.drain(timeout_s), self.tuning.drain(timeout_s))

    async def close(self, *, keep_span: bool = False) -> None:
        """End all work, and free all memory. The weights stay if `keep_span` is true."""
        await self.tuning.close()
        await self.serving.close(keep_span=keep_span)

    def retain(self, host: MemoryLedger) -> RetainedSpan | None:
        """Move the weights of a closed stage into host memory; None if they cannot be kept."""
        return self.serving.retain(host)
