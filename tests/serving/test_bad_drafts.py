"""Peers that guess against the rules: what they cost is bounded, they are told, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from swarmnode.codec.body import EPOCH_TURNS, Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, Drafts, Error, Fault, Input, Mode, Open, Output, Ready
from swarmnode.codec.sampling import Sampling
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.serving.client.generation import drafts_in
from swarmnode.serving.drafting.drafter import Drafter, MtpDrafter
from swarmnode.serving.session.session_streams import ids_input
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import HELLO
from tests.peer.toy_swarm import MODULUS, ToySwarm, expected, link_config, pack
from tests.serving.drafting import Oracle, Steady, toy_drafting

PROMPT = [5, 17, 3]
SESSION, EPOCH, LENGTH, MOST = bytes(16), 1, 200, 8
TURN = EPOCH * EPOCH_TURNS


class FirstHop:
    """A peer that is the first hop of its own session, and sends the last one whatever it likes."""

    def __init__(self, swarm: ToySwarm) -> None:
        self.swarm = swarm
        self.network = swarm.world.join()
        self.board = Switchboard(self.network, SESSION_PROTOCOL, HELLO, link_config())
        self.heard: list[Body] = []
        self.tokens: dict[int, int] = {}
        self.inputs: Channel
        self.ring: Channel

    def _hear(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Output):
            self.tokens[frame.seq] = body.ids[0]
        else:
            self.heard.append(body)

    async def open(self, drafts: int = MOST) -> FirstHop:
        assert await self.network.connect(await self.swarm.client.addresses(), timeout_s=1)
        peer = self.swarm.volunteers[1].peer
        route = (HopSpec(self.network.peer_id, 0, 2), HopSpec(peer, 2, 4))
        sampling = Sampling(len(PROMPT), LENGTH)
        self.inputs = await self.board.call(peer, self._hear, lambda _error: None)
        self.inputs.send(Open(SESSION, EPOCH, route, 1, Mode.RING, 1, LENGTH, sampling=sampling, drafts=drafts))
        self.ring = await self.board.call(peer, self._hear, lambda _error: None)
        self.ring.send(Attach(SESSION, EPOCH))
        self.send(0, PROMPT)
        await asyncio.sleep(0.2)
        assert self.heard == [Ready(0)] and list(self.tokens) == [len(PROMPT)]
        return self

    def send(self, start: int, values: list[int], guessed: int = 0, turn: int = TURN) -> None:
        info, payload = pack(values)
        self.inputs.send(Input(info, guessed=guessed, turn=turn), seq=start, payload=(payload,))

    def draft(self, start: int, *ids: int, turn: int = TURN) -> None:
        self.ring.send(Drafts(ids, turn), seq=start)


async def swarm_of_two() -> ToySwarm:
    return await ToySwarm.start((0, 2), (2, 4))


@in_virtual_time
async def test_guesses_without_their_ids_are_not_computed_and_with_wrong_ids_nothing_is_drawn() -> None:
    swarm = await swarm_of_two()
    hop, worker = await FirstHop(swarm).open(), swarm.volunteers[1].worker
    hop.send(3, [1, 2, 3], guessed=2)
    await asyncio.sleep(1.0)
    assert worker.positions == 3, "the input waits for the ids of its guesses"
    hop.draft(4, 998, 998)
    await asyncio.sleep(1.0)
    assert worker.positions == 6 and list(hop.tokens) == [3, 4], "what is drawn after the true token"


@in_virtual_time
async def test_ids_of_an_earlier_turn_are_never_taken_for_the_later_one() -> None:
    """Else a row that was computed with one token would count as that of another."""
    swarm = await swarm_of_two()
    hop, worker = await FirstHop(swarm).open(), swarm.volunteers[1].worker
    hop.draft(4, 1, 1)
    hop.send(3, [9, 1, 5], guessed=2)
    await asyncio.sleep(0.5)
    before = worker.positions
    hop.send(4, [2, 7], guessed=1, turn=TURN + 1)
    await asyncio.sleep(0.5)
    assert worker.positions == before, "its ids have not come"
    hop.draft(5, 3, turn=TURN + 1)
    await asyncio.sleep(0.5)
    assert worker.positions == before + 2 and max(hop.tokens) == 5


@pytest.mark.parametrize(("guessed", "drafts"), [(9, 8), (1, 0)], ids=["too many", "not allowed"])
@in_virtual_time
async def test_too_many_guesses_end_the_session(guessed: int, drafts: int) -> None:
    swarm = await swarm_of_two()
    hop = await FirstHop(swarm).open(drafts)
    hop.send(3, [1] * 10, guessed=guessed)
    await asyncio.sleep(0.5)
    faults, errors = hop.heard[1:3], hop.heard[3:]
    assert [(body.index, body.code) for body in faults if isinstance(body, Fault)] == [(0, ErrorCode.MALFORMED)] * 2
    assert errors == [Error(ErrorCode.MALFORMED)] * 2
    assert swarm.loads == [0, 0]


@in_virtual_time
async def test_a_client_cannot_guess() -> None:
    swarm = await ToySwarm.start((0, 4))
    heard: list[Body] = []
    peer = swarm.volunteers[0].peer
    channel = await swarm.switchboard.call(peer, lambda _frame, body: heard.append(body), lambda _error: None)
    sampling = Sampling(len(PROMPT), 10)
    channel.send(Open(SESSION, 1, (HopSpec(peer, 0, 4),), 0, Mode.RING, 1, 20, sampling=sampling, drafts=MOST))
    info, payload = ids_input(PROMPT)
    channel.send(Input(info, guessed=1), seq=0, payload=(payload,))
    await asyncio.sleep(0.5)
    assert heard == [Ready(0), Error(ErrorCode.MALFORMED)] and swarm.loads == [0]


@pytest.mark.parametrize("drafts", [MOST, 0], ids=["a stranger", "a session without guesses"])
@in_virtual_time
async def test_ids_from_others_are_refused_and_the_session_goes_on(drafts: int) -> None:
    swarm = await swarm_of_two()
    hop = await FirstHop(swarm).open(drafts)
    heard: list[Body] = []
    peer = swarm.volunteers[1].peer
    board = swarm.switchboard if drafts else hop.board
    channel = await board.call(peer, lambda _frame, body: heard.append(body), lambda _error: None)
    channel.send(Attach(SESSION, EPOCH, start=100))
    channel.send(Drafts((1,), TURN), seq=4)
    await asyncio.sleep(0.5)
    assert heard == [Error(ErrorCode.MALFORMED)]
    hop.send(3, [7])
    await asyncio.sleep(0.5)
    assert 4 in hop.tokens


@in_virtual_time
async def test_guesses_that_are_taken_back_without_end_are_dropped_before_they_are_computed() -> None:
    swarm = await swarm_of_two()
    hop, last = await FirstHop(swarm).open(), swarm.volunteers[1]
    for one in swarm.volunteers:
        one.server.drafting = toy_drafting(0.3)
    swarm.router.most_drafts = MOST
    stream = swarm.ring([1, 2, 3, 4], 60)
    turns = itertools.count(TURN)

    async def flood() -> None:
        while not stream.result.ids or len(stream.result.ids) < 60:
            for turn in itertools.islice(turns, 50):
                hop.draft(4, *range(7), turn=turn)
                hop.send(3, [1] * 8, guessed=7, turn=turn)
            await asyncio.sleep(0.01)

    flooding = asyncio.ensure_future(flood())
    assert [token async for token in stream] == expected([1, 2, 3, 4], 60)
    await flooding
    session = last.server.session(SESSION)
    assert session is not None and session.cursor.accepted <= 11
    assert last.worker.queued < 4 and last.worker.dropped > 1000
    assert len(session._retractions._cuts) <= MOST and len(session._guessed_jobs._guesses) <= 32


@pytest.mark.parametrize("field", ["forced", "guesses"])
@in_virtual_time
async def test_tokens_told_by_the_last_hop_that_the_model_does_not_have_are_not_guessed(field: str) -> None:
    swarm = await ToySwarm.start((0, 2))
    inputs: list[tuple[int, Input]] = []
    network = swarm.world.join()

    def accept(channel: Channel, _frame: Frame, body: Body) -> None:
        channel.on_frame = lambda frame, body: inputs.append((frame.seq, body)) if isinstance(body, Input) else None
        if isinstance(body, Open):
            channel.send(Ready(0))
        elif channel.peer == swarm.volunteers[0].peer:
            channel.send(Output((5,), **{field: (MODULUS,)}), seq=len(PROMPT))
            channel.send(Output((6,), **{field: (7, 8)}), seq=len(PROMPT) + 1)

    board = Switchboard(network, SESSION_PROTOCOL, HELLO, link_config(), accept=accept)
    await board.start()
    assert await network.connect(await swarm.client.addresses(), timeout_s=1)
    told: dict[str, tuple[Drafter, int]] = {"forced": (Oracle([*PROMPT, 5, 6], 0.0), 0), "guesses": (MtpDrafter(), 2)}
    drafter, most = told[field]
    swarm.volunteers[0].server.drafting = lambda _opened: (drafter, Steady(most))
    peer, sampling = swarm.volunteers[0].peer, Sampling(len(PROMPT), 20)
    route = (HopSpec(peer, 0, 2), HopSpec(network.peer_id, 2, 4))
    channel = await swarm.switchboard.call(peer, lambda _frame, _body: None, lambda _error: None)
    channel.send(Open(SESSION, 1, route, 0, Mode.RING, 1, 20, sampling=sampling, drafts=MOST))
    info, payload = ids_input(PROMPT)
    channel.send(Input(info), seq=0, payload=(payload,))
    await asyncio.sleep(0.5)
    assert [(start, body.tensor.shape[1], body.guessed) for start, body in inputs] == [(0, 3, 0), (3, 4, 2)]


@pytest.mark.parametrize(
    "body", [Drafts((1, 2), 0, (1,)), Output((1,), wasted=2, wasted_by=(0, 1)), Output((1,), wasted_by=(1,))], ids=repr
)
def test_proposers_that_contradict_the_guesses_are_refused(body: Drafts | Output) -> None:
    with pytest.raises(ProtocolError, match="proposer"):
        body.check()


def test_an_unknown_proposer_is_another_one() -> None:
    output = Output((1,), guessed=True, wasted=3, proposer=900, wasted_by=(0, 1, *[0] * 13, 2))
    assert dict(drafts_in(output)) == {
        ("other", "accepted"): 1,
        ("lookup", "wasted"): 1,
        ("other", "wasted"): 2,
    }
