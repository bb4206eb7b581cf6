"""What a session accepts, takes back, and keeps for later."""

from __future__ import annotations

import struct

from swarmnode.codec.messages import Truncate
from swarmnode.serving.session.session_streams import ONE_ID, InputCursor


def test_tokens_that_came_too_early_wait_for_their_turn() -> None:
    cursor = InputCursor(received_end=0)
    for position, token in ((5, 50), (4, 40)):
        cursor.hold(position, token)
    assert cursor.next_token() is None
    assert cursor.advance(4) == (0, None)
    cursor.hold(3, 30)  # is here already
    assert cursor.next_token() == (ONE_ID, struct.pack("<q", 40))
    assert cursor.next_token() is None
    assert cursor.advance(5) == (4, None)
    assert cursor.next_token() == (ONE_ID, struct.pack("<q", 50))


def test_what_is_taken_back_is_said_with_the_next_input_and_only_once() -> None:
    cursor = InputCursor(received_end=9)
    cursor.advance(10)
    cursor.hold(10, 1)
    cursor.hold(12, 2)
    assert cursor.truncate(Truncate(1, 8)) and (cursor.accepted, cursor.received_end) == (8, 8)
    assert not cursor.truncate(Truncate(1, 3)), "the session moved, and hears it again"
    assert cursor.truncate(Truncate(2, 6)) and cursor.next_token() is None
    assert cursor.advance(7) == (6, Truncate(2, 6))
    assert cursor.advance(11) == (7, None)
    assert cursor.next_token() is None, "what lay beyond is forgotten"
