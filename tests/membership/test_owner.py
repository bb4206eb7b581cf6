from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.membership.owner import InviteTerms, find_invite, make_invite, newest_list, revoke, with_host_grant
from swarmnode.swarm.records.invite import OwnedInvite, Role, decode_invite, open_grant, sign_swarm
from swarmnode.swarm.records.manifest import OPEN, PRIVATE, TRAIN, encode_manifest, swarm_id
from swarmnode.swarm.records.membership import MAX_REVOKED_PEERS, open_list
from swarmnode.swarm.storage.owner_files import IssuedInvites, open_issued_invites
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm, new_swarm, save_swarm
from tests.swarm.records.test_manifest import make_manifest
from tests.swarm.society import ALICE, BOB, OWNER, STRANGER


def founded(membership: str, **more: str) -> Swarm:
    raw = encode_manifest(make_manifest(owner=OWNER.public, membership=membership, **more))
    return new_swarm(raw, sign_swarm(swarm_id(raw), OWNER))


@pytest.fixture
def swarm() -> Swarm:
    return founded(PRIVATE)


@pytest.fixture
def book(tmp_path: Path) -> IssuedInvites:
    return IssuedInvites(tmp_path / "test.guests")


def test_invites_are_as_the_terms_say_and_are_entered_without_their_secret(swarm: Swarm, book: IssuedInvites):
    line = make_invite(swarm, OWNER, InviteTerms(Role.CLIENT, 7 * 86_400, 3, ALICE, "berlin", "for Alice"), book)
    invite = decode_invite(line)
    assert isinstance(invite, OwnedInvite)
    grant = invite.opened_grant()
    assert (grant.allows, grant.uses, grant.peer, grant.group) == (Role.CLIENT, 3, ALICE, "berlin")
    assert grant.expires_at - grant.issued_at == 7 * 86_400
    book.save()
    assert book.path.stat().st_mode & 0o777 == 0o600
    assert open_issued_invites(book.path) == book and book.guests[0].note == "for Alice"
    assert invite.secret.hex() not in book.path.read_text()
    for text in (line, grant.invite_id.hex(), grant.invite_id.hex()[:6]):
        assert find_invite(text, swarm, book) == grant.invite_id


def test_what_cannot_be_invited(swarm: Swarm, book: IssuedInvites):
    with pytest.raises(UsageError, match="--uses"):
        InviteTerms(uses=-1)
    for terms, words in (
        (InviteTerms(peer="Qm1"), "not a peer id"),
        (InviteTerms(group="x" * 25), "group"),
    ):
        with pytest.raises(UsageError, match=words):
            make_invite(swarm, OWNER, terms, book)
    with pytest.raises(UsageError, match="not the key of the owner"):
        make_invite(swarm, STRANGER, InviteTerms(), book)
    with pytest.raises(UsageError, match="not private"):
        make_invite(founded(OPEN), OWNER, InviteTerms(), book)


def test_the_hosts_own_file_makes_members_that_may_do_everything(swarm: Swarm, book: IssuedInvites, tmp_path: Path):
    path = tmp_path / "test.swarm"
    save_swarm(with_host_grant(swarm, OWNER, book), path)
    book.revocations = revoke(swarm, OWNER, b"", peers=[ALICE])
    book.save()
    again = load_swarm(path)
    assert again.private and again.grant and again.secret and again.revocations == book.revocations
    assert book.guests[0].role == "volunteer" and book.guests[0].expires_at == 0, "no one trains in a swarm that serves"
    assert not decode_invite(again.invite).grant, "what `create` and `host --door-only` print gives nothing away"


def test_no_one_trains_in_a_swarm_that_serves(swarm: Swarm, book: IssuedInvites):
    with pytest.raises(UsageError, match="no trainers: invite a volunteer"):
        make_invite(swarm, OWNER, InviteTerms(Role.TRAINER), book)
    school = founded(PRIVATE, mode=TRAIN)
    assert make_invite(school, OWNER, InviteTerms(Role.TRAINER), book)
    assert decode_grant(with_host_grant(school, OWNER, book)) is Role.TRAINER


def decode_grant(swarm: Swarm) -> Role:
    """The role in a file's own grant."""
    return open_grant(swarm.grant, swarm.id, OWNER.public).allows


def test_lists_grow_and_go_on_from_the_newest(swarm: Swarm):
    first = revoke(swarm, OWNER, b"", peers=[ALICE])
    second = revoke(swarm, OWNER, first, invites=[b"12345678"])
    assert newest_list(swarm, [b"", second, first, b"rubbish"]) == second
    revocations = open_list(second, swarm.id, OWNER.public)
    assert revocations.number == 2 and revocations.covers(ALICE) and b"12345678" in revocations.invites
    assert not revocations.covers(BOB)
    with pytest.raises(UsageError, match="not the key of the owner"):
        revoke(swarm, STRANGER, first, peers=[BOB])
    with pytest.raises(UsageError, match="full"):
        revoke(swarm, OWNER, first, peers=[f"peer {number}" for number in range(MAX_REVOKED_PEERS)])


def test_an_invite_is_found_only_where_it_is_meant(swarm: Swarm, book: IssuedInvites):
    make_invite(swarm, OWNER, InviteTerms(), book)
    assert find_invite(book.guests[0].invite[:5], swarm, book) is None, "too short to be sure"
    assert find_invite("f" * 16, swarm, book) is None
    with pytest.raises(UsageError, match="not an invite that"):
        find_invite(swarm.invite, swarm, book)
