"""Outlet: outputs for those who wait and for those who come later."""

from __future__ import annotations

from typing import Any

from swarmnode.codec.messages import Body, End, Error, Output
from swarmnode.errors import ErrorCode, PeerLost
from swarmnode.roles.outlet import Outlet


class Line:
    """A channel; what is sent on a `cut` one raises."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.cut = False
        self.last: Body | None = None

    def send(self, _body: Body, *, seq: int, payload: tuple[Any, ...]) -> None:
        if self.cut:
            raise PeerLost("cut", peer="p")
        self.heard.append(seq)

    def close(self, last: Body | None) -> None:
        self.last = last or End()


def outlet_with(*positions: int) -> Outlet:
    outlet = Outlet()
    for position in positions:
        outlet.publish(position, Output((position,)), ())
    return outlet


def test_who_comes_later_gets_what_it_lacks_in_order() -> None:
    outlet, line = outlet_with(7, 5, 6), Line()
    outlet.attach(line, 6)  # type: ignore[arg-type]
    outlet.publish(8, Output((8,)), ())
    assert line.heard == [6, 7, 8]
    assert outlet.held(5) == Output((5,)) and outlet.held(9) is None


def test_what_is_forgotten_is_not_sent_again() -> None:
    outlet, line = outlet_with(5), Line()
    outlet.forget()
    outlet.attach(line, 0)  # type: ignore[arg-type]
    assert line.heard == [] and outlet.held(5) is None


def test_a_cut_line_does_not_keep_the_others_waiting() -> None:
    outlet, lines = Outlet(), [Line(), Line(), Line()]
    for line in lines:
        outlet.attach(line, 0)  # type: ignore[arg-type]
    lines[0].cut = True
    outlet.publish(1, Output((1,)), ())
    lines[0].cut = False
    outlet.detach(lines[2])  # type: ignore[arg-type]
    outlet.publish(2, Output((2,)), ())
    assert [line.heard for line in lines] == [[], [1, 2], [1]]


def test_all_hear_why_it_ends_and_nothing_after_that() -> None:
    outlet, line = Outlet(), Line()
    outlet.attach(line, 0)  # type: ignore[arg-type]
    outlet.close(Error(ErrorCode.NOT_FINITE))
    outlet.publish(1, Output((1,)), ())
    assert line.last == Error(ErrorCode.NOT_FINITE) and line.heard == []
