from __future__ import annotations

from swarmnode.net.interfaces import Record, key_digest
from swarmnode.swarm.peers.record_validation import (
    NOTICE_LIFE_S,
    RENEW_S,
    accept_notices,
    by_subkey,
    due,
    notice_keys,
    notice_rules,
    own_notices,
    record_validator,
)
from swarmnode.swarm.records.membership import open_list
from tests.swarm.society import ALICE, BOB, HOME, NOW, OWNER, SWARM, Ticket, listed, private

REVOCATIONS_KEY, USES_KEY = map(key_digest, notice_keys(SWARM))


def filled():
    membership = private()
    membership.admit(ALICE, Ticket(uses=1).certificate(ALICE), NOW)
    membership.adopt_list(listed(peers=(BOB,)))
    return membership


def table(membership, expires_at: float):
    """What a table holds that keeps all of it."""
    found: dict[bytes, dict[bytes, Record]] = {}
    for notice in own_notices(membership):
        found.setdefault(notice.key, {})[notice.subkey] = Record(notice.value, expires_at)
    return found


def test_what_one_peer_knows_another_learns_from_the_table():
    learner = private()
    assert accept_notices(learner, table(filled(), NOW + NOTICE_LIFE_S), NOW)
    assert not learner.stands(BOB, NOW) and learner.revocations.number == 1
    assert [use.member.peer for use in learner.uses] == [ALICE]
    assert not accept_notices(learner, table(filled(), NOW + NOTICE_LIFE_S), NOW), "nothing new"


def test_missing_old_and_ending_notices_are_due():
    membership = filled()
    everything = list(own_notices(membership))
    assert due(membership, {}, NOW) == everything
    assert due(membership, table(membership, NOW + NOTICE_LIFE_S), NOW) == []
    assert due(membership, table(membership, NOW + RENEW_S - 1), NOW) == everything
    newer = listed(peers=(ALICE,), after=open_list(membership.revocations_bytes, SWARM, OWNER.public))
    older = table(membership, NOW + NOTICE_LIFE_S)
    membership.adopt_list(newer)
    assert [notice.value for notice in due(membership, older, NOW)] == [newer]


def test_a_certificate_that_was_cut_short_in_the_table_is_stored_again():
    membership, ticket = private(), Ticket(uses=1)
    membership.admit(ALICE, ticket.certificate(ALICE, home=HOME), NOW)
    (whole,) = own_notices(membership)
    bare = {whole.key: {whole.subkey: Record(ticket.certificate(ALICE), NOW + NOTICE_LIFE_S)}}
    assert due(membership, bare, NOW) == [whole]
    assert due(membership, table(membership, NOW + NOTICE_LIFE_S), NOW) == []


def test_false_notices_are_neither_kept_nor_believed():
    membership = private()
    valid = record_validator(SWARM, lambda *_: True, lambda: NOW, membership=membership)
    good = {notice.subkey: notice for notice in own_notices(filled())}
    for subkey, notice in good.items():
        assert valid(key_digest(notice.key), subkey, notice.value, NOW + NOTICE_LIFE_S)
        assert not valid(key_digest(notice.key), subkey, notice.value, NOW + 2 * NOTICE_LIFE_S), "lives too long"
        assert not valid(key_digest(notice.key), subkey, notice.value[:-1], NOW + NOTICE_LIFE_S), "damaged"
        assert not valid(key_digest(notice.key), subkey + b"x", notice.value, NOW + NOTICE_LIFE_S), "at another's place"
        assert not valid(key_digest(b"invented"), subkey, notice.value, NOW + NOTICE_LIFE_S), (
            "under a key where it does not belong"
        )
    unlimited = Ticket(uses=0).certificate(ALICE)
    assert not valid(USES_KEY, next(iter(good)), unlimited, NOW + NOTICE_LIFE_S)


def test_an_older_list_is_not_kept_once_a_newer_one_is_known():
    membership = private()
    valid = record_validator(SWARM, lambda *_: True, lambda: NOW, membership=membership)
    first = listed(peers=(ALICE,))
    second = listed(peers=(BOB,), after=open_list(first, SWARM, OWNER.public))
    assert valid(REVOCATIONS_KEY, b"revocations", first, NOW + NOTICE_LIFE_S)
    assert valid(REVOCATIONS_KEY, b"revocations", second, NOW + NOTICE_LIFE_S)
    assert not valid(REVOCATIONS_KEY, b"revocations", first, NOW + NOTICE_LIFE_S)
    assert membership.revocations.number == 2


def test_announcements_are_judged_as_ever():
    seen = []
    others = {b"": lambda *arguments: bool(seen.append(arguments)) or True}
    valid = by_subkey({**notice_rules(private(), lambda: NOW), **others})
    assert valid(b"key", ALICE.encode(), b"record", NOW + 5)
    assert seen == [(b"key", ALICE.encode(), b"record", NOW + 5)]
