from __future__ import annotations

import pytest

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.invite import MAX_SKEW_S, Role
from swarmnode.swarm.records.membership import MAX_PEERS_OF_A_HOME, RACE_S, Membership, open_list
from tests.swarm.society import (
    ALICE,
    ANOTHER_HOME,
    BOB,
    CAROL,
    DAY_S,
    HOME,
    NOW,
    OWNER,
    STRANGER,
    SWARM,
    Ticket,
    listed,
    private,
)


def refused(
    membership: Membership, peer: str, certificate: bytes, now: float = NOW, code: ErrorCode = ErrorCode.REFUSED
) -> str:
    with pytest.raises(ProtocolError) as caught:
        membership.admit(peer, certificate, now)
    assert caught.value.code is code
    assert not membership.stands(peer, now)
    return str(caught.value)


def test_members_are_admitted_and_strangers_are_not():
    membership = private()
    membership.admit(ALICE, Ticket(role=Role.TRAINER).certificate(ALICE), NOW)
    assert membership.stands(ALICE, NOW) and membership.role(ALICE) is Role.TRAINER
    assert not membership.stands(BOB, NOW) and membership.role(BOB) is Role.CLIENT
    refused(membership, BOB, b"")
    refused(membership, BOB, Ticket().certificate(ALICE))
    refused(membership, BOB, Ticket(owner=STRANGER).certificate(BOB))


def test_a_membership_expires_by_the_clock_alone():
    membership = private()
    membership.admit(ALICE, Ticket().certificate(ALICE), NOW)
    assert membership.stands(ALICE, NOW + DAY_S - 1)
    assert not membership.stands(ALICE, NOW + DAY_S)
    # "not now": the clock of the peer that refuses may be the wrong one
    assert "expired" in refused(membership, ALICE, Ticket().certificate(ALICE), NOW + DAY_S, ErrorCode.BUSY)


def test_an_admission_of_the_future_is_refused():
    refused(private(), ALICE, Ticket().certificate(ALICE, NOW + MAX_SKEW_S + 2), code=ErrorCode.BUSY)
    private().admit(ALICE, Ticket().certificate(ALICE, NOW + MAX_SKEW_S - 2), NOW)


def test_revoked_peers_and_invites_lose_their_membership_and_older_lists_change_nothing():
    membership, ticket = private(), Ticket()
    for peer in (ALICE, BOB):
        membership.admit(peer, ticket.certificate(peer), NOW)
    first = listed(peers=(ALICE,))
    assert membership.take_list(first)
    assert not membership.stands(ALICE, NOW) and membership.stands(BOB, NOW)
    assert "revoked" in refused(membership, ALICE, ticket.certificate(ALICE))
    second = listed(invites=(ticket.id,), after=open_list(first, SWARM, OWNER.public))
    assert membership.take_list(second)
    assert not membership.stands(BOB, NOW) and not membership.stands(ALICE, NOW)
    assert not membership.take_list(first) and membership.revocations_bytes == second


def test_only_the_owner_revokes():
    from swarmnode.swarm.records.membership import nobody, sign_list

    membership = private()
    with pytest.raises(ProtocolError):
        membership.take_list(sign_list(nobody(SWARM).extended(NOW, peers=[ALICE]), STRANGER))
    with pytest.raises(ProtocolError):
        membership.take_list(sign_list(nobody(bytes(32)).extended(NOW, peers=[ALICE]), OWNER))
    assert membership.revocations.number == 0


def test_in_a_public_swarm_everybody_belongs_but_whom_its_owner_revoked():
    membership = Membership(SWARM, OWNER.public, private=False)
    membership.admit(ALICE, b"", NOW)
    assert membership.stands(ALICE, NOW) and membership.role(ALICE) is Role.TRAINER
    membership.take_list(listed(peers=(ALICE,)))
    assert "revoked" in refused(membership, ALICE, b"")
    membership.admit(BOB, b"", NOW)


def test_what_each_role_may_announce():
    def announce(role: Role, span: tuple[int, int]) -> None:
        said = Announcement(1, SWARM, ALICE, 1, NOW, NOW + 10, NOW, span=span)
        private().vouch(said, Ticket(role=role).certificate(ALICE), NOW)

    announce(Role.VOLUNTEER, (0, 3))
    announce(Role.TRAINER, (0, 3))
    announce(Role.BOOTSTRAP, (0, 0))
    for role, span in ((Role.CLIENT, (0, 0)), (Role.CLIENT, (0, 3)), (Role.BOOTSTRAP, (0, 3))):
        with pytest.raises(ProtocolError) as caught:
            announce(role, span)
        assert caught.value.code is ErrorCode.REFUSED


# -- uses --------------------------------------------------------------------------------------------------------------


def test_the_first_so_many_users_are_admitted_and_may_come_again():
    membership, ticket = private(), Ticket(uses=2)
    for peer in (ALICE, BOB):
        membership.admit(peer, ticket.certificate(peer), NOW)
    assert "used up" in refused(membership, CAROL, ticket.certificate(CAROL, NOW + 1), NOW + 1)
    membership.admit(ALICE, ticket.certificate(ALICE, NOW + 500), NOW + 500)


def test_an_old_date_pushes_nobody_out():
    membership, ticket = private(), Ticket(uses=1)
    membership.admit(BOB, ticket.certificate(BOB, NOW), NOW)
    refused(membership, ALICE, ticket.certificate(ALICE, NOW - 10), NOW + RACE_S + 1)
    assert membership.stands(BOB, NOW + RACE_S + 1)
    refused(membership, ALICE, ticket.certificate(ALICE, NOW - RACE_S - 1), NOW)


def test_two_that_race_for_the_last_place_are_told_apart_alike_everywhere():
    """Each was let in by another corner; when their certificates meet, the earlier one stays on both sides."""
    here, there, ticket = private(), private(), Ticket(uses=1)
    early, late = ticket.certificate(ALICE, NOW), ticket.certificate(BOB, NOW + 1)
    here.admit(ALICE, early, NOW + 1)
    there.admit(BOB, late, NOW + 1)
    assert not here.note_use(late, NOW + 2)
    assert there.note_use(early, NOW + 2)
    for membership in (here, there):
        assert membership.stands(ALICE, NOW + 3) and not membership.stands(BOB, NOW + 3)


def test_a_revoked_peer_keeps_its_place_for_those_who_come_later_too():
    """Else it came back by the same invite, under another name."""
    membership, ticket = private(), Ticket(uses=1)
    membership.take_list(listed(peers=(ALICE,)))
    assert membership.note_use(ticket.certificate(ALICE), NOW)
    assert membership.uses.count(ticket.id) == 1
    assert not membership.stands(ALICE, NOW)
    assert "used up" in refused(membership, BOB, ticket.certificate(BOB, NOW + 1), NOW + 1)


def test_the_programs_of_a_home_are_one_user():
    membership, ticket = private(), Ticket(uses=1)
    for peer in (ALICE, BOB):
        membership.admit(peer, ticket.certificate(peer, home=HOME), NOW)
    assert membership.uses.count(ticket.id) == 1
    for home in (ANOTHER_HOME, None):
        assert "used up" in refused(membership, CAROL, ticket.certificate(CAROL, NOW + 1, home=home), NOW + 1)


def test_a_home_has_so_many_programs_and_cannot_admit_the_world():
    membership, ticket = private(), Ticket(uses=2)
    for number in range(MAX_PEERS_OF_A_HOME):
        membership.admit(f"peer {number}", ticket.certificate(f"peer {number}", home=HOME), NOW)
    assert "home" in refused(membership, ALICE, ticket.certificate(ALICE, NOW + 1, home=HOME), NOW + 1)
    assert not membership.note_use(ticket.certificate(ALICE, NOW + 1, home=HOME), NOW + 1)
    membership.admit(ALICE, ticket.certificate(ALICE, NOW + 1, home=ANOTHER_HOME), NOW + 1)
    assert membership.uses.count(ticket.id) == 2


def test_the_programs_of_a_home_that_race_for_its_last_place_are_told_apart_alike_everywhere():
    ticket = Ticket(uses=1)
    certificates = [
        ticket.certificate(f"peer {number}", NOW + number, home=HOME) for number in range(MAX_PEERS_OF_A_HOME + 1)
    ]
    here, there = private(), private()
    for membership, heard in ((here, certificates), (there, certificates[::-1])):
        for certificate in heard:
            membership.note_use(certificate, NOW + 10)
    assert sorted(use.member.peer for use in here.uses) == sorted(use.member.peer for use in there.uses)


def test_homes_that_race_for_the_last_place_are_told_apart_alike_everywhere():
    """The home of which a program was admitted first stays, with all its programs."""
    here, there, ticket = private(), private(), Ticket(uses=1)
    node, client = ticket.certificate(ALICE, NOW, home=HOME), ticket.certificate(BOB, NOW + 5, home=HOME)
    other = ticket.certificate(CAROL, NOW + 3, home=ANOTHER_HOME)
    for membership, heard in ((here, (node, client, other)), (there, (client, other, node, client))):
        for certificate in heard:
            membership.note_use(certificate, NOW + 6)
        assert sorted(use.member.peer for use in membership.uses) == sorted((ALICE, BOB))


def test_a_peer_that_named_no_home_yet_keeps_its_place_and_is_counted_once():
    """A peer of an older version, that is started again with this one; and a certificate that another member cut short."""
    membership, ticket = private(), Ticket(uses=1)
    membership.note_use(ticket.certificate(ALICE), NOW)
    assert membership.note_use(ticket.certificate(ALICE, home=HOME), NOW), "hearsay changes nothing"
    refused(membership, BOB, ticket.certificate(BOB, NOW + 1, home=HOME), NOW + 1)
    membership.admit(ALICE, ticket.certificate(ALICE, home=HOME), NOW)
    membership.admit(BOB, ticket.certificate(BOB, NOW + 1, home=HOME), NOW + 1)
    assert membership.note_use(ticket.certificate(ALICE), NOW + 2) and membership.uses.count(ticket.id) == 1


def test_the_holder_of_an_invite_cannot_declare_another_peer_its_own():
    """Else it shared the place of a peer of an older version."""
    membership, ticket = private(), Ticket(uses=1)
    membership.admit(ALICE, ticket.certificate(ALICE), NOW)
    membership.note_use(ticket.certificate(ALICE, home=ANOTHER_HOME), NOW + RACE_S)
    refused(membership, CAROL, ticket.certificate(CAROL, NOW, home=ANOTHER_HOME), NOW + RACE_S + 1)
    assert membership.stands(ALICE, NOW + RACE_S + 1)


def test_a_revoked_home_brings_no_other_program():
    membership, ticket = private(), Ticket(uses=2)
    membership.admit(ALICE, ticket.certificate(ALICE, home=HOME), NOW)
    membership.take_list(listed(homes=(HOME.public,)))
    assert not membership.stands(ALICE, NOW)
    assert "revoked" in refused(membership, BOB, ticket.certificate(BOB, home=HOME))
    assert membership.uses.count(ticket.id) == 1, "and it keeps its place"
    membership.admit(CAROL, ticket.certificate(CAROL, home=ANOTHER_HOME), NOW)


def test_uses_of_a_revoked_invite_are_forgotten():
    membership, ticket = private(), Ticket(uses=1)
    membership.admit(ALICE, ticket.certificate(ALICE), NOW)
    assert [use.member.peer for use in membership.uses] == [ALICE]
    membership.take_list(listed(invites=(ticket.id,)))
    assert not list(membership.uses)


def test_members_that_somebody_invents_by_his_invite_keep_nobody_out(monkeypatch: pytest.MonkeyPatch):
    """An invite without a number of uses makes as many identities as its holder likes."""
    monkeypatch.setattr("swarmnode.swarm.records.membership.MAX_MEMBERS", 8)
    swarm, flood, friends = private(), Ticket("flood"), Ticket("friends")
    invented = [f"invented {number}" for number in range(8)]
    for peer in invented:
        swarm.admit(peer, flood.certificate(peer), NOW)
    with pytest.raises(ProtocolError) as caught:
        swarm.admit("one more", flood.certificate("one more"), NOW)
    assert caught.value.code == ErrorCode.BUSY
    for peer in (ALICE, BOB, CAROL):
        swarm.admit(peer, friends.certificate(peer), NOW)
    assert {member.peer for member in swarm.members(NOW)} == {ALICE, BOB, CAROL, *invented[:5]}
    with pytest.raises(ProtocolError):
        swarm.admit(invented[7], flood.certificate(invented[7]), NOW)
    swarm.take_list(listed(invites=(flood.id,)))
    assert {member.peer for member in swarm.members(NOW)} == {ALICE, BOB, CAROL}
    for number in range(4):
        swarm.admit(f"friend {number}", friends.certificate(f"friend {number}"), NOW)
