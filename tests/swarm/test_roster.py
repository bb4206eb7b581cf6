from swarmnode.swarm.announcement import State
from swarmnode.swarm.roster import MAX_PROBATION_S, Roster
from tests.swarm.test_announcement import NOW, make


def at(second, peer="a", life=16, **changes):
    """The announcement that `peer` issued `second` seconds after NOW."""
    times = {"sequence": int(second * 1000) + 1, "issued_at": NOW + second, "expires_at": NOW + second + life}
    return make(peer, **{**times, **changes})


def roster_with(*announcements, now=0.0):
    roster = Roster()
    for announcement in announcements:
        roster.observe(announcement)
    roster.update(NOW + now)
    return roster


def test_live_until_expiry():
    roster = roster_with(at(0, "a"), at(0, "b", life=5))
    assert list(roster.live) == ["a", "b"]
    assert roster.update(NOW + 5.1)
    assert list(roster.live) == ["a"]
    assert not roster.update(NOW + 6)
    assert repr(roster) == "<Roster 1 live, 1 known, 0 suspected>"


def test_older_record_is_ignored():
    roster = roster_with(at(5, span=(2, 4)), at(0, span=(0, 2)))
    assert roster.live["a"].span == (2, 4)


def test_goodbye_cannot_be_undone_by_a_replay():
    old = at(0)
    roster = roster_with(old, at(1, state=State.OFFLINE))
    assert not roster.live
    roster.observe(old)
    roster.update(NOW + 2)
    assert not roster.live


def test_suspected_peer_needs_newer_word_and_probation():
    roster = roster_with(at(0))
    roster.suspect("a", "hung", NOW + 3)
    assert roster.update(NOW + 3) and not roster.live
    roster.observe(at(2.9))  # was on its way when the peer died
    roster.update(NOW + 10)
    assert not roster.live
    roster.observe(at(4))
    roster.update(NOW + 4)
    assert not roster.live, "probation of 2 s"
    assert roster.update(NOW + 5.1)
    assert list(roster.live) == ["a"]


def test_probation_doubles_and_is_bounded():
    roster = roster_with(at(0))
    now = 0.0
    for probation in (2, 4, 8, 16, 32, MAX_PROBATION_S, MAX_PROBATION_S):
        roster.suspect("a", "hung again", NOW + now)
        roster.observe(at(now + 0.5, life=119))
        roster.update(NOW + now + probation - 0.1)
        assert not roster.live
        now += probation + 0.1
        roster.update(NOW + now)
        assert list(roster.live) == ["a"]


def test_several_failures_at_once_are_one_strike():
    roster = roster_with(at(0))
    for session in range(5):
        roster.suspect("a", f"session {session}", NOW + 1)
    roster.observe(at(1.5))
    roster.update(NOW + 3.1)
    assert list(roster.live) == ["a"]


def test_restarted_peer_is_used_at_once():
    roster = roster_with(at(0))
    roster.suspect("a", "killed", NOW + 1)
    roster.observe(at(1.2, started_at=NOW + 1.1))
    assert roster.update(NOW + 1.3)
    assert list(roster.live) == ["a"]


def test_suspicion_of_a_stranger_does_nothing():
    roster = roster_with(at(0))
    roster.suspect("nobody", "?", NOW)
    assert not roster.update(NOW)
