"""Output stream: outputs for those who wait and for those who come later."""

from __future__ import annotations

from typing import Any

from swarmnode.codec.body import Body
from swarmnode.codec.messages import End, Error, Output
from swarmnode.errors import ErrorCode, PeerLost
from swarmnode.serving.session.session_streams import OutputStream


class Line:
    """A channel; what is sent on a `cut` one raises."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.cut = False
        self.last: Body | None = None

    def send(self, _body: Body, *, seq: int, payload: tuple[Any, ...], at_once: bool = False) -> None:
        if self.cut:
            raise PeerLost("cut", peer="p")
        self.heard.append(seq)

    def close(self, last: Body | None) -> None:
        self.last = last or End()


def output_stream_with(*positions: int) -> OutputStream:
    output_stream = OutputStream()
    for position in positions:
        output_stream.publish(position, Output((position,)), ())
    return output_stream


def test_who_comes_later_gets_what_it_lacks_in_order() -> None:
    output_stream, line = output_stream_with(7, 5, 6), Line()
    output_stream.attach(line, 6)  # type: ignore[arg-type]
    output_stream.publish(8, Output((8,)), ())
    assert line.heard == [6, 7, 8]
    assert output_stream.held(5) == Output((5,)) and output_stream.held(9) is None


def test_what_is_forgotten_is_not_sent_again() -> None:
    output_stream, line = output_stream_with(5), Line()
    output_stream.forget()
    output_stream.attach(line, 0)  # type: ignore[arg-type]
    assert line.heard == [] and output_stream.held(5) is None


def test_a_cut_line_does_not_keep_the_others_waiting() -> None:
    output_stream, lines = OutputStream(), [Line(), Line(), Line()]
    for line in lines:
        output_stream.attach(line, 0)  # type: ignore[arg-type]
    lines[0].cut = True
    output_stream.publish(1, Output((1,)), ())
    lines[0].cut = False
    output_stream.detach(lines[2])  # type: ignore[arg-type]
    output_stream.publish(2, Output((2,)), ())
    assert [line.heard for line in lines] == [[], [1, 2], [1]]


def test_all_hear_why_it_ends_and_nothing_after_that() -> None:
    output_stream, line = OutputStream(), Line()
    output_stream.attach(line, 0)  # type: ignore[arg-type]
    output_stream.close(Error(ErrorCode.NOT_FINITE))
    output_stream.publish(1, Output((1,)), ())
    assert line.last == Error(ErrorCode.NOT_FINITE) and line.heard == []
