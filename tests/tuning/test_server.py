"""A hop's tuning server and peers that ask too much of it, or for another peer's adapter, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from swarmnode.codec.body import MAX_ROWS, Body, HopSpec
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import Error, Fault, decode_body, encode_body
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import (
    MAX_ADAPTER_BYTES,
    TUNE_PROTOCOL,
    AdapterOpened,
    AdapterPiece,
    Gather,
    Gathered,
    GetAdapter,
    JoinAdapter,
    OpenAdapter,
    TuneCounted,
    TuneGradient,
    TuneInput,
    TuneLabels,
    TuneLoss,
    Update,
    Updated,
)
from swarmnode.compress.codecs import encode_values
from swarmnode.compute.executor import Urgency, WorkItem
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import METHODS, AdapterRecipe
from swarmnode.compute.training.adapters.adapter_trainer import ActivationSize
from swarmnode.config import ServerConfig
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.memory.network import FakeWorld
from swarmnode.serving.session.session_memory import Promise
from swarmnode.tuning import server
from swarmnode.tuning.adapter_parts import TuningDevice, TuningPace, encode_recipe
from swarmnode.tuning.server import ADAPTERS, ADAPTERS_OF_PEER, TuningServer
from tests.compute.inline_executor import InlineExecutor
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import HELLO, ToyPeer
from tests.tiny import TinyModel
from tests.training.scene import Talk

ID = bytes(16)
RECIPE = AdapterRecipe(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
IDS = torch.arange(16).reshape(2, 8)
ROOM = 1 << 26
UNITS = 4


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> ModelSpan:
    """The whole of a tiny model: one hop is a route."""
    tiny = TinyModel.save(tmp_path_factory.mktemp("tiny"), layers=UNITS - 2)
    return load_span(Checkpoint(tiny.folder), 0, UNITS, check=False)


class Scene:
    """A server, and two peers."""

    def __init__(self, span: ModelSpan, cost_s: float, share: float) -> None:
        world = FakeWorld(seed=1)
        self.networks = [world.join() for _ in range(3)]
        self.peer, *self.others = (network.peer_id for network in self.networks)
        span.adapters.ledger = self.ledger = MemoryLedger(ROOM)
        self.hidden_size = span.hidden_size
        self.busy_s = 0.0  # of items that compute
        self.cost_s = cost_s
        self.executor = InlineExecutor(self._cost_s)
        device = TuningDevice(span, self.executor, TuningPace(self.executor, share, lambda: share < 1))
        config = ServerConfig(forgotten_s=60.0)
        self.server = TuningServer(ToyPeer(self.networks[0], LinkConfig(), HELLO), [device], config, frozenset({0, 1}))
        self.boards = [Switchboard(network, TUNE_PROTOCOL, HELLO, LinkConfig()) for network in self.networks[1:]]

    def _cost_s(self, item: WorkItem) -> float:
        if item.urgency is not Urgency.CONTROL:
            self.busy_s += self.cost_s
        return self.cost_s

    def opening(self, **changes: Any) -> OpenAdapter:
        route = (HopSpec(self.peer, 0, UNITS),)
        return msgspec.structs.replace(OpenAdapter(ID, 1, route, 0, encode_recipe(RECIPE), 2, 8, 2), **changes)

    async def open(self, board: int = 0, **changes: Any) -> tuple[Talk, Body | PeerError]:
        talk = await Talk.begin(self.boards[board], self.peer)
        return talk, await talk.ask(self.opening(**changes))

    @property
    def held(self) -> int:
        return self.ledger.used_bytes


@asynccontextmanager
async def scene_of(span: ModelSpan, cost_s: float = 0.0, share: float = 1.0) -> AsyncIterator[Scene]:
    """`share` below 1: sessions run on the device all the time."""
    scene = Scene(span, cost_s, share)
    await scene.server.start()
    for network in scene.networks[1:]:
        await network.connect(await scene.networks[0].addresses(), timeout_s=1)
    yield scene
    for board in scene.boards:
        await board.close()
    await scene.server.close()
    await asyncio.sleep(1.0)
    assert scene.held == 0, "nothing stays behind"
    await scene.executor.close()
    for network in scene.networks:
        await network.close()


def feed(talk: Talk, number: int = 0, *, step: int = 0, ids: torch.Tensor = IDS) -> None:
    infos, payload = encode_values((ids,))
    talk.send(TuneLabels(step, number, infos, 1 / 14), payload)
    talk.send(TuneInput(step, number, infos), payload)


async def one_step(talk: Talk) -> float:
    """A step of one microbatch; its loss."""
    feed(talk)
    loss = await talk.next()
    assert isinstance(loss, TuneLoss) and loss.labels == 14
    assert isinstance(await talk.next(), TuneCounted)
    gathered = await talk.ask(Gather(0))
    assert isinstance(gathered, Gathered) and gathered.counted == b"\x01" and gathered.square > 0
    assert await talk.ask(Update(0, 1e-2, 1.0)) == Updated(1)
    return loss.loss


async def state_of(talk: Talk, step: int) -> list[bytes]:
    """The files of all layers, as the hop gives them."""
    frames: list[AdapterPiece] = []
    talk.send(GetAdapter(step))
    while not frames or not frames[-1].last:
        body = await talk.next()
        assert isinstance(body, AdapterPiece)
        frames.append(body)
    return [bytes(frame.size) for frame in frames]


@in_virtual_time
async def test_two_peers_with_the_same_id_have_an_adapter_each(span: ModelSpan) -> None:
    async with scene_of(span) as scene:
        (one, first), (other, second) = await scene.open(0), await scene.open(1)
        assert isinstance(first, AdapterOpened) and isinstance(second, AdapterOpened) and first.adapter_bytes > 0
        loss = await one_step(one)
        assert isinstance(await other.ask(Gather(1)), Fault), "the other one is at its own first step"
        _, again = await scene.open(1, epoch=2)
        assert isinstance(again, AdapterOpened)
        later, _ = await scene.open(0, adapter=bytes([1] * 16))
        assert await one_step(later) == loss, "what one owner trained is not in another adapter"
        thief = await Talk.begin(scene.boards[1], scene.peer)
        refused = await thief.ask(JoinAdapter(ID, 1))
        assert refused == Error(ErrorCode.NO_SESSION), "only the hop before it may feed an adapter"


def recipe_of(**changes: Any) -> bytes:
    return encode_recipe(replace(RECIPE, **changes))


FROZEN_RANK = msgspec.msgpack.encode({"method": "lora-fa", "rank": 513})
BAD: dict[str, tuple[dict[str, Any], ErrorCode]] = {
    "a recipe of no method": ({"recipe": b"\x81\xa6method\xa3sft"}, ErrorCode.MALFORMED),
    "a rank beyond all bounds": ({"recipe": b"\x81\xa4rank\xce\xff\xff\xff\xff"}, ErrorCode.MALFORMED),
    "layers that are not here": ({"units": (0, UNITS + 1)}, ErrorCode.WRONG_SPAN),
    "a route to another peer": ({"peer": "elsewhere"}, ErrorCode.MALFORMED),
    "a codec that the swarm forbids": ({"codec": 3}, ErrorCode.INVALID_REQUEST),
    "more memory than there is": ({"recipe": encode_recipe(AdapterRecipe(rank=4096))}, ErrorCode.TOO_LARGE),
    "layers of another model": ({"recipe": recipe_of(targets=("sft_proj",))}, ErrorCode.INVALID_REQUEST),
    "a rank that its method cannot have": ({"recipe": FROZEN_RANK}, ErrorCode.MALFORMED),
}


@pytest.mark.parametrize("name", BAD)
@in_virtual_time
async def test_an_adapter_that_cannot_be_had_is_refused(span: ModelSpan, name: str) -> None:
    changes, code = BAD[name]
    async with scene_of(span) as scene:
        start, end = changes.get("units", (0, UNITS))
        peer = str(changes.get("peer", scene.peer))
        given = {key: value for key, value in changes.items() if key not in ("peer", "units")}
        held = [object() for _ in range(ADAPTERS)]
        for number, place in enumerate(held):
            scene.server._places.admit(place, Claimant(f"group {number}", f"owner {number}"))
        _, answer = await scene.open(route=(HopSpec(peer, start, end),), **given)
        assert isinstance(answer, Error) and answer.code == code
        assert all(place in scene.server._places for place in held), "no other owner gave up a place for it"
        _, good = await scene.open()
        assert isinstance(good, AdapterOpened) and sum(place in scene.server._places for place in held) == ADAPTERS - 1


@in_virtual_time
async def test_an_opening_for_huge_microbatches_is_an_estimate_and_a_huge_microbatch_is_refused(
    span: ModelSpan,
) -> None:
    async with scene_of(span) as scene:
        talk, answer = await scene.open(rows=MAX_ROWS, positions=256, window=64)
        assert isinstance(answer, AdapterOpened)
        assert decode_body(FrameKind.ADAPTER_OPENED, encode_body(answer)) == answer, "within the bounds of the wire"
        assert await one_step(talk) > 0, "small ones have room"
        feed(talk, step=1, ids=IDS.repeat(512, 1))
        answer = await talk.next()
        assert isinstance(answer, Fault) and answer.code == ErrorCode.TOO_LARGE, "another machine may have the memory"


@pytest.mark.parametrize("size_bytes", [1, 1 << 30, (1 << 36) - 1, 1 << 36, 1 << 37, 1 << 50])
@pytest.mark.parametrize("window", [1, 64])
@in_virtual_time
async def test_estimates_stay_within_the_bounds_of_the_wire(
    span: ModelSpan, monkeypatch: pytest.MonkeyPatch, size_bytes: int, window: int
) -> None:
    monkeypatch.setattr(ActivationSize, "of", lambda _self, _rows, _positions: size_bytes)
    async with scene_of(span) as scene:
        _, answer = await scene.open(window=window)
        assert isinstance(answer, AdapterOpened) and answer.pass_bytes == min(window * size_bytes, MAX_ADAPTER_BYTES)
        assert decode_body(FrameKind.ADAPTER_OPENED, encode_body(answer)) == answer


@in_virtual_time
async def test_a_peer_pauses_between_its_openings_and_others_do_not_wait(span: ModelSpan) -> None:
    clock = asyncio.get_running_loop().time
    async with scene_of(span) as scene:
        began_s, tries = clock(), 3 * int(server.OPENINGS.at_once)
        for epoch in range(1, tries + 1):
            _, answer = await scene.open(epoch=epoch)
            assert isinstance(answer, AdapterOpened)
        assert clock() - began_s >= (tries - server.OPENINGS.at_once - 1) / server.OPENINGS.per_s
        began_s = clock()
        _, answer = await scene.open(1)
        assert isinstance(answer, AdapterOpened) and clock() - began_s < 1.0
        flood = [asyncio.ensure_future(scene.open(adapter=bytes([number] * 16))) for number in range(1, 41)]
        codes = [answer.code for _, answer in await asyncio.gather(*flood) if isinstance(answer, Error)]
        assert len(codes) == 40 - ADAPTERS_OF_PEER + 1 and set(codes) == {ErrorCode.BUSY}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["openings", "updates", "microbatches", "states", "evaluations"])
@in_virtual_time
async def test_nothing_that_tuning_computes_takes_more_than_its_share(span: ModelSpan, method: str, what: str) -> None:
    """Each item of the device's work takes a tenth of a second while sessions run. Those that only free memory do not count."""
    clock = asyncio.get_running_loop().time
    async with scene_of(span, cost_s=0.1, share=0.3) as scene:
        small = encode_recipe(replace(RECIPE, method=method, prompt_tokens=2))
        talk, answer = await scene.open(recipe=small, positions=10)
        assert isinstance(answer, AdapterOpened)
        began_s, busy_s = clock(), scene.busy_s
        for turn in range(3):
            if what == "openings":
                talk, _ = await scene.open(recipe=small, epoch=2 + turn, positions=10)
            elif what == "updates":
                assert await talk.ask(Update(turn, 1e-2, 1.0)) == Updated(turn + 1)
            elif what == "states":
                assert len(await state_of(talk, 0)) == UNITS
            else:
                infos, payload = encode_values((IDS,))
                talk.send(TuneLabels(0, turn, infos, 1 / 14), payload)
                talk.send(TuneInput(0, turn, infos, what == "microbatches"), payload)
                assert isinstance(await talk.next(), TuneLoss)
                assert what == "evaluations" or isinstance(await talk.next(), TuneCounted)
        assert scene.busy_s - busy_s >= 0.3
        assert scene.busy_s - busy_s <= 0.3 * (clock() - began_s) + 0.3, "two items more at the ends"


@in_virtual_time
async def test_a_peer_has_so_many_adapters_and_no_more(span: ModelSpan) -> None:
    async with scene_of(span) as scene:
        for number in range(ADAPTERS_OF_PEER):
            _, answer = await scene.open(adapter=bytes([number] * 16))
            assert isinstance(answer, AdapterOpened)
        _, answer = await scene.open(adapter=bytes([99] * 16))
        assert isinstance(answer, Error) and answer.code == ErrorCode.BUSY
        _, other = await scene.open(1)
        assert isinstance(other, AdapterOpened), "others have their own"


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("twice", ErrorCode.MALFORMED),
        ("another step", ErrorCode.MALFORMED),
        ("too many", ErrorCode.TOO_LARGE),
        ("too long", ErrorCode.TOO_LARGE),
        ("vocabulary", ErrorCode.MALFORMED),
        ("early update", ErrorCode.MALFORMED),
        ("foreign state", ErrorCode.INVALID_REQUEST),
        ("large state", ErrorCode.TOO_LARGE),
        ("layers out of order", ErrorCode.MALFORMED),
        ("gradients of another step", ErrorCode.MALFORMED),
        ("gradients and a state", ErrorCode.MALFORMED),
        ("commands at once", ErrorCode.MALFORMED),
        ("labels of another step", ErrorCode.MALFORMED),
    ],
)
@in_virtual_time
async def test_an_owner_that_breaks_a_rule_loses_its_adapter(span: ModelSpan, what: str, code: ErrorCode) -> None:
    async with scene_of(span) as scene:
        talk, _ = await scene.open()
        if what == "twice":
            feed(talk)
            assert isinstance(await talk.next(), TuneLoss) and isinstance(await talk.next(), TuneCounted)
            feed(talk)
        elif what == "another step":
            feed(talk, step=2)
        elif what == "too many":
            infos, payload = encode_values((IDS,))
            for number in range(3):
                talk.send(TuneInput(0, number, infos), payload)
        elif what == "too long":
            feed(talk, ids=IDS.repeat(1, 2))
        elif what == "vocabulary":
            feed(talk, ids=IDS + (1 << 20))
        elif what == "early update":
            talk.send(Update(1, 1e-2, 1.0))
        elif what == "foreign state":
            for unit in range(UNITS):
                talk.send(AdapterPiece(0, unit, 0, 16, unit == UNITS - 1), [bytes(16)])
        elif what == "layers out of order":
            talk.send(AdapterPiece(0, 1, 0, 16), [bytes(16)])
        elif what == "gradients of another step":
            talk.send(AdapterPiece(1, 0, 0, 16, False, True), [bytes(16)])
        elif what == "gradients and a state":
            talk.send(AdapterPiece(0, 0, 0, 16, False, True), [bytes(8)])
            talk.send(AdapterPiece(0, 0, 8, 16, False, False), [bytes(8)])
        elif what == "commands at once":
            for _ in range(2):
                talk.send(GetAdapter(0))
        elif what == "labels of another step":
            infos, payload = encode_values((IDS,))
            talk.send(TuneLabels(2, 0, infos, 1.0), payload)
        else:
            talk.send(AdapterPiece(0, 0, 0, 1 << 35), [bytes(16)])
        answer = await talk.next()
        assert isinstance(answer, Fault) and answer.code == code and answer.index == 0
        assert scene.server.load == 0


@in_virtual_time
async def test_commands_and_microbatches_may_come_before_their_turn(span: ModelSpan) -> None:
    """A hop gathers once all microbatches are counted, and begins those of the next step after its UPDATE."""
    async with scene_of(span, cost_s=1.0) as scene:
        talk, _ = await scene.open()
        talk.send(Gather(0, 2))
        feed(talk, 0)
        feed(talk, 1)
        reports = [await talk.next() for _ in range(5)]
        assert [type(one) for one in reports] == [TuneLoss, TuneCounted, TuneLoss, TuneCounted, Gathered]
        assert isinstance(reports[-1], Gathered) and reports[-1].counted == b"\x03"
        first = next(one.loss for one in reports if isinstance(one, TuneLoss))
        feed(talk, 0, step=1)
        assert await talk.ask(Update(0, 1e-1, 1.0)) == Updated(1)
        later = await talk.next()
        assert isinstance(later, TuneLoss) and later.step == 1 and later.loss < first, "computed by the updated weights"


@in_virtual_time
async def test_an_adapter_whose_owner_is_silent_expires(span: ModelSpan) -> None:
    async with scene_of(span) as scene:
        talk, _ = await scene.open()
        await asyncio.sleep(50.0)
        assert len(await state_of(talk, 0)) == UNITS and scene.held > 0
        await asyncio.sleep(50.0)
        assert scene.held > 0
        await asyncio.sleep(20.0)
        assert isinstance(await talk.next(), Error) and scene.server.load == 0 and scene.held == 0


@pytest.mark.parametrize("wait_s", [0.5, 1.5])
@in_virtual_time
async def test_what_happens_while_an_adapter_opens_leaves_nothing_behind(span: ModelSpan, wait_s: float) -> None:
    """A second request for it is refused meanwhile, and so is the first one if the server ends: each item takes a second."""
    async with scene_of(span, cost_s=1.0) as scene:
        talk, twin = await Talk.begin(scene.boards[0], scene.peer), await Talk.begin(scene.boards[0], scene.peer)
        talk.send(scene.opening())
        answer = await twin.ask(scene.opening(epoch=2))
        assert isinstance(answer, Error) and answer.code == ErrorCode.BUSY
        await asyncio.sleep(wait_s)
        assert scene.server.load == 0
        await scene.server.close()
        await asyncio.sleep(5.0)
        assert scene.held == 0


@in_virtual_time
async def test_an_adapter_that_ends_takes_its_passes_along(span: ModelSpan) -> None:
    async with scene_of(span, cost_s=1.0) as scene:
        talk, _ = await scene.open()
        feed(talk)
        talk.send(TuneInput(0, 1, encode_values((IDS,))[0]), encode_values((IDS,))[1])  # whose labels never come
        await asyncio.sleep(0.5)
        ended = next(iter(scene.server._adapters.values()))
        assert len(ended._tasks) == 2
        assert talk.channel is not None
        talk.channel.close()
        await asyncio.sleep(5.0)
        assert (len(ended._tasks), scene.server.load, scene.held) == (0, 0, 0)


# -- owners that compute the model's ends


async def open_between(scene: Scene, start: int = 1, end: int = UNITS - 1, **changes: Any) -> Talk:
    """An adapter on a route without the embedding, the head, or both."""
    talk, opened = await scene.open(route=(HopSpec(scene.peer, start, end),), **changes)
    assert isinstance(opened, AdapterOpened)
    return talk


def enter(talk: Talk, values: torch.Tensor, number: int = 0, *, learns: bool = True) -> None:
    infos, payload = encode_values((values,))
    talk.send(TuneInput(0, number, infos, learns), payload)


def turn(talk: Talk, gradient: torch.Tensor, number: int = 0, codec: Codec = Codec.NONE) -> None:
    infos, payload = encode_values((gradient,), codec, topk_share=0.01)
    talk.send(TuneGradient(0, number, (True,), infos), payload)


@pytest.mark.parametrize(("start", "end"), [(1, UNITS - 1), (0, UNITS - 1), (1, UNITS)])
@in_virtual_time
async def test_an_owner_may_compute_either_end_of_the_model(span: ModelSpan, start: int, end: int) -> None:
    hidden = torch.randn(2, 8, span.hidden_size, generator=torch.manual_seed(0))
    async with scene_of(span) as scene:
        talk = await open_between(scene, start, end)
        for number in range(3):
            enter(talk, hidden if start else IDS, number)
            if end < UNITS:
                out = await talk.next()
                assert isinstance(out, TuneInput) and out.values[0].shape == tuple(hidden.shape)
                turn(talk, hidden, number)
            else:
                infos, payload = encode_values((IDS,))
                talk.send(TuneLabels(0, number, infos, 1 / 14), payload)
                assert isinstance(await talk.next(), TuneLoss)
            back = await talk.next()
            if start:
                assert isinstance(back, TuneGradient) and back.values[0].shape == tuple(hidden.shape)
            else:
                assert back == TuneCounted(0, number)
        gathered = await talk.ask(Gather(0))
        assert isinstance(gathered, Gathered) and gathered.counted == b"\x07" and gathered.square > 0


@in_virtual_time
async def test_passes_that_their_owner_drops_or_only_evaluates_count_nothing(span: ModelSpan) -> None:
    hidden = torch.zeros(2, 8, span.hidden_size)
    async with scene_of(span) as scene:
        talk = await open_between(scene)
        held = scene.held
        for number in range(4):  # more than the window
            enter(talk, hidden, number, learns=number % 2 == 0)
            assert isinstance(await talk.next(), TuneInput)
            if number % 2 == 0:
                assert scene.held > held
                assert await talk.ask(TuneGradient(0, number, (), ())) == TuneGradient(0, number, (), ())
        gathered = await talk.ask(Gather(0))
        assert isinstance(gathered, Gathered) and gathered.counted == b""
        assert scene.held == held


HOSTILE = {
    "another shape": ErrorCode.MALFORMED,
    "not in flight": ErrorCode.MALFORMED,
    "twice": ErrorCode.MALFORMED,
    "another codec": ErrorCode.MALFORMED,
    "nan": ErrorCode.NOT_FINITE,
    "too wide": ErrorCode.TOO_LARGE,
    "dropped with a loss": ErrorCode.MALFORMED,
    "never": ErrorCode.BUSY,
}


@pytest.mark.parametrize("what", HOSTILE)
@in_virtual_time
async def test_an_owner_whose_gradients_do_not_fit_loses_its_adapter(span: ModelSpan, what: str) -> None:
    hidden = torch.zeros(2, 8, span.hidden_size)
    async with scene_of(span) as scene:
        talk = await open_between(scene, end=UNITS if what == "dropped with a loss" else UNITS - 1)
        if what == "too wide":
            enter(talk, hidden.repeat(1, 1, 2))
        elif what == "dropped with a loss":
            enter(talk, hidden)
            talk.send(TuneGradient(0, 0, (), ()))
        else:
            enter(talk, hidden)
            assert isinstance(await talk.next(), TuneInput)
        if what == "another shape":
            turn(talk, hidden[:, :7])
        elif what == "not in flight":
            turn(talk, hidden, number=1)
        elif what == "twice":
            turn(talk, hidden)
            assert isinstance(await talk.next(), TuneGradient)
            turn(talk, hidden)
        elif what == "another codec":
            turn(talk, hidden, codec=Codec.TOPK)
        elif what == "nan":
            turn(talk, hidden * torch.nan)
        elif what == "never":
            for _ in range(2):  # an owner that is heard keeps its adapter, and not a place in it
                await asyncio.sleep(25.0)
                talk.send(GetAdapter(0))
                while not isinstance(piece := await talk.next(), AdapterPiece) or not piece.last:
                    pass
            await asyncio.sleep(15.0)
        answer = await talk.next()
        assert isinstance(answer, Fault) and answer.code == HOSTILE[what] and answer.index == 0
        await asyncio.sleep(1.0)
        assert (scene.server.load, scene.held) == (0, 0)


# -- memory of several owners


LONG = torch.zeros(64, 512, dtype=torch.int64)


def wait_for_next_step(talk: Talk, numbers: range) -> None:
    infos, payload = encode_values((LONG,))
    for number in numbers:
        talk.send(TuneInput(1, number, infos), payload)


@in_virtual_time
async def test_the_owner_whose_payloads_take_most_gives_way_once_they_leave_too_little(span: ModelSpan) -> None:
    async with scene_of(span) as scene:
        scene.ledger.limit_bytes = None
        modest, _ = await scene.open(0, rows=64, positions=512, window=16)
        greedy, _ = await scene.open(1, rows=64, positions=512, window=16)
        wait_for_next_step(modest, range(4))
        wait_for_next_step(greedy, range(8))
        await asyncio.sleep(1.0)
        total = sum(one.payload_bytes for one in scene.server._adapters.values())
        assert total == 12 * LONG.nbytes
        host = scene.server.switchboard.ledger
        host.limit_bytes = host.used_bytes + total + (1 << 12)  # what waits leaves a little more free than it takes
        wait_for_next_step(modest, range(4, 5))
        await asyncio.sleep(1.0)
        assert scene.server.load == 1 and isinstance(await greedy.next(), Error)
        assert await modest.ask(Update(0, 1e-2, 1.0)) == Updated(1), "the other one goes on"
        host.limit_bytes = None


@pytest.mark.parametrize("what", ["inputs", "labels"])
@in_virtual_time
async def test_what_waits_for_the_owner_waits_for_so_long_and_no_longer(span: ModelSpan, what: str) -> None:
    async with scene_of(span) as scene:
        talk, _ = await scene.open()
        infos, payload = encode_values((IDS,))
        talk.send(TuneInput(1 if what == "inputs" else 0, 0, infos), payload)
        for _ in range(2):  # an owner that is heard keeps its adapter, and not a place in it
            await asyncio.sleep(25.0)
            assert len(await state_of(talk, 0)) == UNITS
        await asyncio.sleep(15.0)
        answer = await talk.next()
        assert isinstance(answer, Fault) and answer.code == ErrorCode.BUSY and scene.server.load == 0


@in_virtual_time
async def test_adapters_give_way_in_max_min_fairness(span: ModelSpan) -> None:
    """To sessions, whose peers hold what the promises say, and to other owners."""
    asker = Claimant("asker's group", "asker")
    for held, ended in ((0, 1), (1 << 30, 0)):
        async with scene_of(span) as scene:
            small, _ = await scene.open(0)
            large, _ = await scene.open(1, recipe=recipe_of(rank=8))
            promise = Promise(asker, (held,), MemoryLedger().count(Account.JOURNALS))
            assert scene.server.give_way(asker, 1000, [promise]) is bool(ended)
            assert scene.server.load == 2 - ended
            if ended:
                assert isinstance(await large.next(), Error), "the owner with most goes first"
                assert len(await state_of(small, 0)) == UNITS


@pytest.mark.parametrize("asks", ["opening", "pass"])
@in_virtual_time
async def test_an_owner_with_less_finds_room(span: ModelSpan, asks: str) -> None:
    """Passes of one owner, whose gradients never come, take all memory of the device."""
    hidden = torch.zeros(2, 8, span.hidden_size)
    async with scene_of(span) as scene:
        other = (await scene.open(1))[0] if asks == "pass" else None
        greedy = await open_between(scene, window=64)
        for number in range(40):
            enter(greedy, hidden, number)
            assert isinstance(await greedy.next(), TuneInput)
        scene.ledger.limit_bytes = scene.held + 1000
        other = other or (await scene.open(1))[0]
        assert await one_step(other) > 0
        assert scene.server.load == 1 and isinstance(await greedy.next(), Error)


@in_virtual_time
async def test_an_owner_with_more_finds_none(span: ModelSpan) -> None:
    async with scene_of(span) as scene:
        small, _ = await scene.open(0)
        with scene.ledger.reserve(Account.KV_CACHE, int(scene.ledger.free_bytes) - 1000):
            _, answer = await scene.open(1, recipe=recipe_of(rank=8))
            assert isinstance(answer, Error) and answer.code == ErrorCode.BUSY
            assert await one_step_fails(small)


async def one_step_fails(talk: Talk) -> bool:
    """Whether there is no room for a pass, since nobody holds more: the adapter ends."""
    feed(talk)
    answer = await talk.next()
    return isinstance(answer, Fault) and answer.code == ErrorCode.BUSY
