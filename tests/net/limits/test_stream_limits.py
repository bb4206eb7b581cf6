from __future__ import annotations

from swarmnode.net.fair_share import (
    HALF_OPEN,
    HALF_OPEN_OF_GROUP,
    HALF_OPEN_OF_PEER,
    NEW_OF_PEER,
    OPEN_OF_PEER,
    StreamLimits,
)


class OpenedStream:
    """As much of a stream as is counted."""

    def __init__(self, peer: str, group: str) -> None:
        self.peer = peer
        self.group = group
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def enter(limits: StreamLimits, peer: str, group: str, count: int = 1) -> list[OpenedStream]:
    streams = [OpenedStream(peer, group) for _ in range(count)]
    return [stream for stream in streams if limits.enter(stream)]  # type: ignore[arg-type]


def test_a_peer_and_a_group_have_so_many_that_are_not_greeted():
    limits = StreamLimits(lambda: 0.0)
    assert len(enter(limits, "a", "one", 100)) == HALF_OPEN_OF_PEER
    others = [stream for number in range(100) for stream in enter(limits, f"b{number}", "one", 10)]
    assert len(others) == HALF_OPEN_OF_GROUP - HALF_OPEN_OF_PEER
    assert len(enter(limits, "c", "two")) == 1


def test_who_comes_when_all_places_are_taken_gets_one_from_who_has_most():
    limits = StreamLimits(lambda: 0.0)
    held = [
        stream for group in range(4) for peer in range(4) for stream in enter(limits, f"{group} {peer}", f"{group}", 32)
    ]
    assert len(held) == HALF_OPEN == limits.half_open
    assert len(enter(limits, "friend", "home")) == 1
    assert sum(stream.aborted for stream in held) == 1


def test_open_ones_are_counted_apart_and_come_free():
    now = [0.0]
    limits = StreamLimits(lambda: now[0])
    let_in: list[OpenedStream] = []
    for _ in range(10):
        now[0] += 60
        for stream in enter(limits, "a", "one", 20):
            limits.let_in(stream)  # type: ignore[arg-type]
            let_in += [] if stream.aborted else [stream]
    assert len(let_in) == OPEN_OF_PEER and limits.half_open == 0
    limits.leave(let_in[0])  # type: ignore[arg-type]
    limits.leave(let_in[0])  # type: ignore[arg-type]
    (late,) = enter(limits, "a", "one")
    limits.let_in(late)  # type: ignore[arg-type]
    assert not late.aborted


def test_new_ones_have_a_pace():
    """700 came in 1.5 s, and as many again."""
    now = [0.0]
    limits = StreamLimits(lambda: now[0])
    taken = 0
    for _ in range(700):
        now[0] += 1.5 / 700
        for stream in enter(limits, "a", "one"):
            limits.leave(stream)  # type: ignore[arg-type]
            taken += 1
    assert taken <= NEW_OF_PEER.at_once + 2 * NEW_OF_PEER.per_s
