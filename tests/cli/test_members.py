"""`swarmnode members`: what the owner reads of invites."""

from __future__ import annotations

import re
import time

import pytest

from swarmnode.cli.host.members import end, invites_table
from swarmnode.client.owner_client import invites_given_out
from swarmnode.swarm.storage.issued_invites import IssuedInvite

HOUR_S = 3600


def guest(invite: str, *, expires_in_s: int = 0, uses: int = 0) -> IssuedInvite:
    now = int(time.time())
    return IssuedInvite(invite, "volunteer", now - HOUR_S, now + expires_in_s if expires_in_s else 0, uses, "", "")


def test_invites_beside_what_the_swarm_knows() -> None:
    picture = {
        "members": [{"peer": "a", "invite": "one"}, {"peer": "b", "invite": "open"}, {"peer": "c"}],
        "uses": {"one": 2},
        "revocations": {"invites": ["gone"]},
    }
    guests = [guest("one", uses=2), guest("open"), guest("gone"), guest("fresh", expires_in_s=-60)]
    invites = invites_given_out(guests, picture)
    assert [(i["id"], i["uses"], i["used"], i["revoked"]) for i in invites] == [
        ("one", 2, 2, False),
        ("open", None, 1, False),
        ("gone", None, 0, True),
        ("fresh", None, 0, False),
    ]
    columns = {str(column.header): list(map(str, column.cells)) for column in invites_table(invites).columns}
    assert columns["used"] == ["2 of 2", "1", "0", "0"]
    assert columns["until"] == ["for ever", "for ever", "revoked", "expired"]


@pytest.mark.parametrize(
    ("in_s", "looks_like"), [(5 * HOUR_S, r"\d{4}-\d\d-\d\d \d\d:\d\d"), (100 * HOUR_S, r"\d{4}-\d\d-\d\d")]
)
def test_an_end_that_is_near_is_told_to_the_minute(in_s: int, looks_like: str) -> None:
    assert re.fullmatch(looks_like, end(int(time.time()) + in_s))
