"""Invites of version 2: to swarms that have an owner."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.swarm.records.invite import OwnedInvite, decode_invite, encode_invite, looks_like_invite, sign_swarm
from swarmnode.swarm.records.manifest import PRIVATE, encode_manifest, swarm_id
from swarmnode.swarm.storage.swarmfile import load_swarm, new_swarm
from tests.swarm.records.test_manifest import make_manifest
from tests.swarm.society import OWNER, STRANGER, SWARM, Ticket

TICKET = Ticket()
PUBLIC = OwnedInvite(SWARM, "test", (), OWNER.public, sign_swarm(SWARM, OWNER))
GRANTING = msgspec.structs.replace(PUBLIC, private=True, grant=TICKET.grant, secret=TICKET.key.seed)


@pytest.mark.parametrize("invite", [PUBLIC, GRANTING, msgspec.structs.replace(PUBLIC, private=True)])
def test_round_trip(invite: OwnedInvite):
    line = encode_invite(invite)
    assert line.startswith("swarm2") and looks_like_invite(line)
    assert decode_invite(line.upper()) == invite
    swarm = load_swarm(line)
    assert (swarm.owner, swarm.private, swarm.grant) == (OWNER.public, invite.private, invite.grant)


def test_its_secret_is_not_shown():
    assert TICKET.key.seed.hex() not in repr(GRANTING) and str(TICKET.key.seed) not in repr(GRANTING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signature": sign_swarm(SWARM, STRANGER)}, "owner's signature"),
        ({"signature": sign_swarm(bytes(32), OWNER)}, "owner's signature"),
        ({"owner": STRANGER.public}, "owner's signature"),
        ({"owner": b""}, "owner's key"),
        ({"grant": Ticket(owner=STRANGER).grant}, "grant of the owner's"),
        ({"grant": Ticket("other").grant}, "grant of the owner's"),
        ({"secret": b"x" * 32}, "grant of the owner's"),
        ({"secret": b""}, "grant of the owner's"),
        ({"private": False}, "grant of the owner's"),
    ],
)
def test_what_the_owner_did_not_sign_is_refused_before_anything_is_fetched(changes, words: str):
    with pytest.raises(UsageError, match=words):
        encode_invite(msgspec.structs.replace(GRANTING, **changes))


def test_the_manifest_must_name_the_owner_of_the_invite():
    raw = encode_manifest(make_manifest(owner=OWNER.public, membership=PRIVATE))
    signature = sign_swarm(swarm_id(raw), OWNER)
    swarm = new_swarm(raw, signature)
    assert swarm.private and load_swarm(swarm.invite).with_manifest(raw).manifest == swarm.manifest
    with pytest.raises(ProtocolError, match="not signed by its owner"):
        new_swarm(raw, sign_swarm(swarm_id(raw), STRANGER))
    with pytest.raises(ProtocolError, match="not signed by its owner"):
        new_swarm(raw)
    as_public = msgspec.structs.replace(decode_invite(swarm.invite), private=False)
    with pytest.raises(ProtocolError, match="tampered"):
        load_swarm(encode_invite(as_public)).with_manifest(raw)


@pytest.mark.parametrize("changes", [{"membership": "secret"}, {"membership": PRIVATE}, {"owner": b"short"}])
def test_manifests_that_cannot_be(changes):
    with pytest.raises(ProtocolError, match="manifest is not valid"):
        encode_manifest(make_manifest(**changes))


def test_addresses_that_command_a_terminal_are_refused() -> None:
    with pytest.raises(UsageError, match="bootstrap addresses"):
        decode_invite(
            encode_invite(msgspec.structs.replace(PUBLIC, bootstraps=("/ip4/203.0.113.7\x1b]0;owned\x07/tcp/1",)))
        )
