"""Of whom most of the others say that it contributes what is not its gradient; one member's word decides nothing about another."""

from __future__ import annotations

import pytest

from swarmnode.codec.training_messages import Group, MemberSpec, Reduced
from swarmnode.net.interfaces import PeerId
from swarmnode.training.coordinator.averaging_groups import AllReduceAttempt

RUN = bytes(32)


def convicted(suspects: dict[PeerId, PeerId], *, listeners: str = "") -> PeerId | None:
    """After each peer has said whom it suspects (empty: nobody)."""
    members = tuple(MemberSpec(peer, int(peer not in listeners)) for peer in suspects)
    attempt = AllReduceAttempt(3, 1, [Group(0, (0,), members)], suspects)
    for peer, suspect in suspects.items():
        assert attempt.accept(peer, Reduced(3, 1, (1.0,), RUN, suspect))
    assert attempt.over and not attempt.failed
    return attempt.convicted


@pytest.mark.parametrize(
    ("suspects", "found"),
    [
        ({"a": "d", "b": "d", "c": "d", "d": ""}, "d"),
        ({"a": "d", "b": "d", "c": "", "d": "a"}, "d"),
        ({"a": "", "b": "", "c": "", "d": "a"}, None),  # one liar
        ({"a": "d", "b": "c", "c": "b", "d": "a"}, None),
        ({"a": "c", "b": "c", "c": "c"}, "c"),
        ({"a": "c", "b": "", "c": "c"}, None),  # its own word is none
        ({"a": "b", "b": ""}, None),  # of two nobody can tell
        ({"a": "x", "b": "x", "c": "x", "d": "x"}, None),  # a stranger
        ({"a": "e", "b": "e", "c": "", "d": "", "e": ""}, None),  # half is not most
        ({"a": "e", "b": "e", "c": "e", "d": "", "e": ""}, "e"),
    ],
)
def test_most_of_the_others(suspects: dict[PeerId, PeerId], found: PeerId | None) -> None:
    assert convicted(suspects) == found


def test_listeners_have_no_voice_and_are_not_judged() -> None:
    assert convicted({"a": "c", "b": "", "c": "", "d": "c", "e": "c"}, listeners="de") is None
    assert convicted({"a": "d", "b": "d", "c": "d", "d": ""}, listeners="d") is None
