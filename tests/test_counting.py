"""Numbers of things, as people read them."""

from __future__ import annotations

from swarmnode.counting import counted


def test_one_is_one() -> None:
    assert [counted(number, "machine") for number in (0, 1, 2, 2000)] == [
        "0 machines",
        "1 machine",
        "2 machines",
        "2,000 machines",
    ]
