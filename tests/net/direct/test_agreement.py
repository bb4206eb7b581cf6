"""Two sides of one agreement, and what must not agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.errors import ProtocolError
from swarmnode.net.direct.direct_stream import KeyPair, Occasion

OCCASION = Occasion("alice", "bob", "/test/echo/1")


def test_both_sides_derive_the_same_and_each_secret_is_another() -> None:
    opener, acceptor = KeyPair(), KeyPair()
    agreement = opener.as_opener(acceptor.public, OCCASION)
    assert agreement == acceptor.as_acceptor(opener.public, OCCASION)
    assert len({agreement.token, agreement.welcome, agreement.opener_key, agreement.acceptor_key}) == 4
    assert agreement != KeyPair().as_opener(acceptor.public, OCCASION)
    for secret in (agreement.token, agreement.opener_key):
        assert secret.hex() not in repr(agreement)


@pytest.mark.parametrize("other", [{"opener": "mallory"}, {"acceptor": "mallory"}, {"protocol": "/test/other/1"}])
def test_who_thinks_of_another_occasion_agrees_on_nothing(other: dict[str, str]) -> None:
    opener, acceptor = KeyPair(), KeyPair()
    ours = opener.as_opener(acceptor.public, OCCASION)
    theirs = acceptor.as_acceptor(opener.public, replace(OCCASION, **other))
    assert ours.token != theirs.token
    assert ours.opener_key != theirs.opener_key


def test_a_key_that_makes_the_same_secret_with_everybody_is_refused() -> None:
    with pytest.raises(ProtocolError):
        KeyPair().as_opener(bytes(32), OCCASION)
