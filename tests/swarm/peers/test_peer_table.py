from swarmnode.swarm.peers.peer_table import AWAY_S, FIRST_LOOK_S, PeerTable
from swarmnode.swarm.records.announcement import State
from swarmnode.tolerances import MAX_PROBATION_S
from tests.swarm.records.test_announcement import NOW, make


def at(second, peer="a", life=16, **changes):
    """The announcement that `peer` issued `second` seconds after NOW."""
    times = {"sequence": int(second * 1000) + 1, "issued_at": NOW + second, "expires_at": NOW + second + life}
    return make(peer, **{**times, **changes})


def peer_table_with(*announcements, now=0.0):
    peer_table = PeerTable()
    for announcement in announcements:
        peer_table.observe(announcement)
    peer_table.update(NOW + now)
    return peer_table


def test_live_until_expiry():
    peer_table = peer_table_with(at(0, "a"), at(0, "b", life=5))
    assert list(peer_table.live) == ["a", "b"]
    assert peer_table.update(NOW + 5.1)
    assert list(peer_table.live) == ["a"]
    assert not peer_table.update(NOW + 6)
    assert repr(peer_table) == "<PeerTable 1 live, 1 known, 0 suspected>"


def test_a_peer_that_comes_to_a_units_holders_is_known_to_be_later():
    def ready(second, peer, step, **changes):
        return at(second, peer, **{"state": State.READY, "span": (0, 2), "training_step": step, "life": 60, **changes})

    peer_table = peer_table_with(ready(0, "first", 40))
    peer_table.observe(ready(5, "there before", 40))
    peer_table.update(NOW + 5)
    assert peer_table.ready_after() == {"first": -1, "there before": -1}, "this machine has only begun to look"

    later = FIRST_LOOK_S + 1
    peer_table.observe(ready(later, "first", 50))
    peer_table.observe(ready(later, "late", 1 << 40))  # whatever it says of itself
    peer_table.observe(ready(later, "elsewhere", 50, span=(2, 4)))
    peer_table.observe(ready(later, "loading", 50, state=State.LOADING))
    peer_table.update(NOW + later)
    assert peer_table.ready_after() == {"first": -1, "there before": -1, "late": 50, "elsewhere": -1}

    peer_table.update(NOW + later + 60 + AWAY_S / 2)
    assert not peer_table.live
    assert peer_table.ready_after()["first"] == -1, "a peer that is away for a while keeps its place"
    peer_table.observe(ready(700, "first", 50, span=(0, 3)))
    peer_table.update(NOW + 700)
    assert peer_table.ready_after()["first"] == -1, "nobody else is known to be at a step"


def test_older_record_is_ignored():
    peer_table = peer_table_with(at(5, span=(2, 4)), at(0, span=(0, 2)))
    assert peer_table.live["a"].span == (2, 4)


def test_goodbye_cannot_be_undone_by_a_replay():
    old = at(0)
    peer_table = peer_table_with(old, at(1, state=State.OFFLINE))
    assert not peer_table.live
    peer_table.observe(old)
    peer_table.update(NOW + 2)
    assert not peer_table.live


def test_who_pauses_is_forgiven_however_often_it_does():
    peer_table = peer_table_with(at(0))
    for second in range(10, 100, 10):
        peer_table.suspect("a", "PEER_LOST", NOW + second)
        peer_table.observe(at(second + 1, state=State.PAUSED))
        peer_table.suspect("a", "PEER_LOST", NOW + second + 2)
        peer_table.observe(at(second + 3))
        peer_table.update(NOW + second + 3)
        assert list(peer_table.live) == ["a"]


def test_suspected_peer_needs_newer_word_and_probation():
    peer_table = peer_table_with(at(0))
    peer_table.suspect("a", "hung", NOW + 3)
    assert peer_table.update(NOW + 3) and not peer_table.live
    peer_table.observe(at(2.9))  # was on its way when the peer died
    peer_table.update(NOW + 10)
    assert not peer_table.live
    peer_table.observe(at(4))
    peer_table.update(NOW + 4)
    assert not peer_table.live, "probation of 2 s"
    assert peer_table.update(NOW + 5.1)
    assert list(peer_table.live) == ["a"]


def test_probation_doubles_and_is_bounded():
    peer_table = peer_table_with(at(0))
    now = 0.0
    for probation in (2, 4, 8, 16, 32, MAX_PROBATION_S, MAX_PROBATION_S):
        peer_table.suspect("a", "hung again", NOW + now)
        peer_table.observe(at(now + 0.5, life=119))
        peer_table.update(NOW + now + probation - 0.1)
        assert not peer_table.live
        now += probation + 0.1
        peer_table.update(NOW + now)
        assert list(peer_table.live) == ["a"]


def test_several_failures_at_once_are_one_strike():
    peer_table = peer_table_with(at(0))
    for session in range(5):
        peer_table.suspect("a", f"session {session}", NOW + 1)
    peer_table.observe(at(1.5))
    peer_table.update(NOW + 3.1)
    assert list(peer_table.live) == ["a"]


def test_restarted_peer_is_used_at_once():
    peer_table = peer_table_with(at(0))
    peer_table.suspect("a", "killed", NOW + 1)
    peer_table.observe(at(1.2, started_at=NOW + 1.1))
    assert peer_table.update(NOW + 1.3)
    assert list(peer_table.live) == ["a"]


def test_suspicion_of_a_stranger_does_nothing():
    peer_table = peer_table_with(at(0))
    peer_table.suspect("nobody", "?", NOW)
    assert not peer_table.update(NOW)
