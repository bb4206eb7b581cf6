"""Where a text ends does not depend on how it came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.client.text_stream import StopStrings

LETTERS = st.text("ab\n", max_size=12)


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_any_cutting_ends_before_the_stop_that_was_said_first(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    told = StopStrings(stops)
    said = "".join(told.push(piece) for piece in pieces)
    alone = StopStrings(stops)
    assert said + told.flush() == "".join(alone.push(letter) for letter in text) + alone.flush()
    assert (told.matched is not None) is any(stop in text for stop in stops)
    assert text.startswith(said)


def test_what_may_begin_a_stop_is_held_back_and_nothing_else() -> None:
    stops = StopStrings(["</end>"])
    assert [stops.push(piece) for piece in ("a<", "/e", "m", "</en")] == ["a", "", "</em", ""]
    assert (stops.flush(), stops.matched) == ("</en", None)
