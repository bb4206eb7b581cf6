"""Whose fault a fault is: the peer's, perhaps the peer's, or the request's own."""

from __future__ import annotations

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.errors import ErrorCode
from swarmnode.serving.client.blame import Blame, Verdict
from tests.watch import Watch

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
