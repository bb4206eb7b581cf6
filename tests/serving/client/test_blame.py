"""Whose fault a fault is: the peer's, perhaps the peer's, or the request's own."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Fault, Output
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import ErrorCode, NoRoute
from swarmnode.net.identity import Identity
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.generation import GenerateOptions, RingStream
from swarmnode.serving.client.router import Blame, Verdict, suspects_of
from swarmnode.serving.job import Job, JobResult
from swarmnode.serving.session.session_streams import OutputStream
from swarmnode.tolerances import CLAIMS
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import MODULUS, ToySwarm, expected
from tests.watch import Watch

THREE, PROMPT = ((0, 1), (1, 3), (3, 4)), [5, 17, 3, 99, 42]
ANN, BOB, EVE = HopSpec("ann", 0, 2), HopSpec("bob", 0, 2), HopSpec("eve", 2, 4)


@pytest.fixture
def clock() -> Watch:
    return Watch(10.0)


@pytest.fixture
def blame(clock: Watch) -> Blame:
    return Blame(clock, avoid_s=1.0)


def test_who_is_gone_failed_by_itself(blame: Blame) -> None:
    assert blame.judge(ANN, ErrorCode.PEER_LOST) is Verdict.PEER
    assert blame.judge(BOB, ErrorCode.PEER_LOST) is Verdict.PEER, "two that are gone are no request's fault"
    assert blame.avoided == {"ann", "bob"}


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FINITE])
def test_an_error_that_another_peer_does_not_make_was_the_peers(blame: Blame, code: ErrorCode) -> None:
    assert blame.judge(ANN, code) is Verdict.ELSEWHERE
    assert blame.progress([BOB, EVE]) == [("ann", code)]
    assert blame.progress([BOB, EVE]) == []


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.INVALID_REQUEST, ErrorCode.MALFORMED])
def test_an_error_that_follows_the_request_is_the_requests(blame: Blame, code: ErrorCode) -> None:
    assert blame.judge(ANN, code) is Verdict.ELSEWHERE
    assert blame.judge(BOB, code) is Verdict.REQUEST


def test_errors_at_different_stages_or_of_different_kinds_do_not_follow_one_another(blame: Blame) -> None:
    assert blame.judge(ANN, ErrorCode.INTERNAL) is Verdict.ELSEWHERE
    assert blame.judge(EVE, ErrorCode.INTERNAL) is Verdict.ELSEWHERE
    assert blame.judge(BOB, ErrorCode.NOT_FINITE) is Verdict.ELSEWHERE


def test_progress_between_two_errors_parts_them(blame: Blame) -> None:
    assert blame.judge(ANN, ErrorCode.INTERNAL) is Verdict.ELSEWHERE
    assert blame.progress([BOB, EVE]) == [("ann", ErrorCode.INTERNAL)]
    assert blame.judge(BOB, ErrorCode.INTERNAL) is Verdict.ELSEWHERE


@pytest.mark.parametrize("code", [ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.TOO_LARGE, ErrorCode.NO_SESSION])
def test_who_has_no_room_did_no_wrong(blame: Blame, code: ErrorCode) -> None:
    assert [blame.judge(hop, code) for hop in (ANN, BOB)] == [Verdict.ELSEWHERE] * 2
    assert blame.progress([EVE]) == []


def test_the_time_for_which_a_peer_is_left_out_grows_and_is_forgiven(blame: Blame, clock: Watch) -> None:
    assert blame.pardon_s is None
    for expected_s in (1.0, 2.0, 4.0):
        blame.judge(ANN, ErrorCode.BUSY)
        assert blame.pardon_s == pytest.approx(expected_s) and blame.avoided == {"ann"}
        clock.now_s += expected_s
        assert blame.avoided == frozenset()
    blame.progress([ANN, EVE])
    blame.judge(ANN, ErrorCode.BUSY, retry_s=7.0)
    assert blame.pardon_s == pytest.approx(7.0), "as it asked"


def test_where_nobody_says_who_stands_still_others_are_taken_and_nobody_is_blamed(blame: Blame) -> None:
    blame.leave_out([ANN, EVE])
    assert blame.avoided == {"ann", "eve"}
    assert blame.progress([BOB]) == []


CODES = [ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.NOT_FINITE, ErrorCode.PEER_LOST, ErrorCode.BUSY]
FIRSTS, LASTS = (
    [HopSpec(name, 0, 2) for name in ("ann", "bob", "cat")],
    [HopSpec(name, 2, 4) for name in ("eve", "fay", "gus")],
)


def best(blame: Blame, firsts: int, lasts: int) -> list[str]:
    """The peers of the best route over the first so many holders of each half."""

    def find(avoid: frozenset[str]) -> list[str]:
        for one, other in product(FIRSTS[:firsts], LASTS[:lasts]):
            if not avoid & {one.peer, other.peer}:
                return [one.peer, other.peer]
        raise NoRoute("nobody is left")

    return blame.best_route(find)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("liar", ["ann", "eve"])
@pytest.mark.parametrize(("firsts", "lasts"), [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)])
def test_a_hop_that_accuses_its_neighbour_is_left_out_where_others_hold_its_layers(
    blame: Blame, clock: Watch, code: ErrorCode, liar: str, firsts: int, lasts: int
) -> None:
    """Whichever of the two it is: the routes tried one after another come to one without it, and nobody is suspected in others."""
    goes_on = firsts > 1 if liar == "ann" else lasts > 1
    for _ in range(2 * CLAIMS):
        try:
            route = best(blame, firsts, lasts)
        except NoRoute:
            clock.now_s += blame.pardon_s or 0.0
            continue
        if liar not in route:
            assert goes_on
            return
        accused = next(hop for hop in (*FIRSTS, *LASTS) if hop.peer in route and hop.peer != liar)
        verdict = blame.judge(accused, code, suspects=route)
        assert verdict is Verdict.ELSEWHERE or (verdict is Verdict.UNDECIDED and not goes_on)
    assert not goes_on


@pytest.mark.parametrize("code", CODES)
def test_a_claim_makes_no_peer_suspected_after_another_route_has_succeeded(blame: Blame, code: ErrorCode) -> None:
    assert blame.judge(EVE, code, suspects=["ann", "eve"]) is Verdict.ELSEWHERE
    assert blame.progress([ANN, HopSpec("fay", 2, 4)]) == []


@pytest.mark.parametrize(("claims", "suspects"), [(3, 2), (12, 2), (30, 2), (8, 16), (60, 16)])
def test_claims_of_many_liars_without_a_common_suspect_are_explained_in_bounded_time(
    blame: Blame, claims: int, suspects: int
) -> None:
    """Each claim names other peers: trying all sets of them would take the client's thread for hours."""
    routes = [[f"{claim}-{place}" for place in range(suspects)] for claim in range(claims)]
    for route in routes:
        blame.judge(HopSpec(route[-1], 0, 2), ErrorCode.PEER_LOST, suspects=route)
    tried: list[frozenset[str]] = []

    def find(avoid: frozenset[str]) -> list[str]:
        tried.append(avoid)
        if len(tried) > 2 and any(route[-1] not in avoid for route in routes):  # the two first ones are all that rest
            return []
        raise NoRoute("nobody is left")

    assert blame.best_route(find) == []
    assert all(len(avoid.intersection(route)) == 1 for avoid in tried[2:] for route in routes), "one of each, no more"


def test_routes_without_a_common_suspect_decide(blame: Blame) -> None:
    code = ErrorCode.INVALID_REQUEST
    assert blame.judge(EVE, code, suspects=["ann", "eve"]) is Verdict.ELSEWHERE
    assert blame.judge(HopSpec("fay", 2, 4), code, suspects=["ann", "fay"]) is Verdict.ELSEWHERE, (
        "ann may have made both"
    )
    assert blame.judge(HopSpec("gus", 2, 4), code, suspects=["bob", "gus"]) is Verdict.REQUEST


@pytest.mark.parametrize(
    ("code", "claimant", "suspects"),
    [
        (ErrorCode.PEER_LOST, 0, "ab"),
        (ErrorCode.PEER_LOST, 1, "b"),
        (ErrorCode.INTERNAL, 1, "b"),
        (ErrorCode.INTERNAL, None, "abc"),
        (ErrorCode.NOT_FINITE, 1, "ab"),  # the hop before may have sent finite values that overflow
        (ErrorCode.NOT_FINITE, 2, "abc"),
        (ErrorCode.BUSY, None, "abc"),
    ],
)
def test_suspects_are_those_that_can_have_made_the_report(code: ErrorCode, claimant: int | None, suspects: str) -> None:
    route = [HopSpec(name, place, place + 1) for place, name in enumerate("abcd")]
    assert suspects_of(route, 1, code, claimant) == set(suspects)


def stream_of(swarm: ToySwarm) -> RingStream:
    options, clock = GenerateOptions(max_new_tokens=8), asyncio.get_running_loop().time
    spec = options.spec(PROMPT, vocabulary=MODULUS)
    return RingStream(ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=clock), options)


@pytest.mark.parametrize("code", [ErrorCode.NOT_FINITE, ErrorCode.MALFORMED, ErrorCode.INVALID_REQUEST])
@pytest.mark.parametrize("place", [1, 2], ids=["middle", "last"])
@pytest.mark.parametrize("after", [0, 7])
@in_virtual_time
async def test_the_hop_before_is_named_for_invalid_values(place: int, code: ErrorCode, after: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    receiver = swarm.volunteers[place].worker
    honest = receiver._result

    def refuse(job: Job) -> JobResult:
        return JobResult(error=code, bad_input=True) if job.end > after else honest(job)

    receiver._result = refuse  # type: ignore[method-assign]
    stream = stream_of(swarm)
    assert [token async for token in stream] == expected(PROMPT, 8)
    assert stream.session.stats.faults[0] == (swarm.volunteers[place - 1].peer, code.name)
    assert swarm.router.suspected == []


@pytest.mark.parametrize("wrong", [(MODULUS,), (1 << 30,), ()], ids=["beyond", "far beyond", "none"])
@in_virtual_time
async def test_a_last_hop_that_feeds_the_first_one_other_tokens_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...]
) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    first, liar, publish = swarm.volunteers[0].peer, swarm.volunteers[2].peer, OutputStream.publish

    def lie(self: OutputStream, position: int, output: Output, payload: tuple[bytes, ...], **how: bool) -> None:
        for channel in [one for one in self._subscribers if one.peer == first]:  # the ring of the liar's session
            tensor = None if wrong else TensorInfo(Codec.NONE, DType.FLOAT32, (1, 1, 1))
            channel.send(Output(wrong, output.final, tensor), seq=position, payload=() if wrong else (bytes(4),))
            self._subscribers.remove(channel)
        publish(self, position, output, payload, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(OutputStream, "publish", lie)
    stream = stream_of(swarm)
    assert [token async for token in stream] == expected(PROMPT, 8)
    assert stream.session.stats.faults[0] == (liar, ErrorCode.MALFORMED.name)
    assert swarm.router.suspected == []


@in_virtual_time
async def test_a_signed_report_names_its_author_and_a_changed_one_nobody() -> None:
    swarm = await ToySwarm.start((0, 4))
    session = stream_of(swarm).session
    keys = [Identity.generate() for _ in range(3)]
    session.route = tuple(HopSpec(key.peer_id, place, place + 1) for place, key in enumerate(keys))
    for place, key in enumerate(keys):
        fault = Fault(1, 1, ErrorCode.BUSY, 2.0)
        signature = key.sign(fault.statement(session.id))
        assert session._signer(Fault(1, 1, ErrorCode.BUSY, 2.0, signature)) == place
        for other in (
            Fault(2, 1, 7, 2.0, signature),
            Fault(1, 2, 7, 2.0, signature),
            Fault(1, 1, 7, 3600.0, signature),
        ):
            assert session._signer(other) is None
