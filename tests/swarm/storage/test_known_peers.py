import stat

from swarmnode.swarm.storage.remembered import MAX_PEERS, KnownPeers
from tests.swarm.records.test_announcement import NOW, make


def announced(peer):
    return make(peer, addresses=(f"/ip4/10.0.0.1/tcp/{len(peer)}",))


def test_addresses_survive_a_restart(tmp_path):
    known = KnownPeers(tmp_path / "peers" / "test.json")
    assert known.addresses() == []
    known.remember([announced("a")], NOW)
    known.remember([announced("bb"), announced("me"), make("c")], NOW + 1, own="me")
    known.save()
    again = KnownPeers(known.path)
    assert again.addresses() == ["/ip4/10.0.0.1/tcp/2/p2p/bb", "/ip4/10.0.0.1/tcp/1/p2p/a"]
    assert stat.S_IMODE(known.path.stat().st_mode) == 0o600


def test_bounded_and_newest_stay(tmp_path):
    known = KnownPeers(tmp_path / "p.json")
    for i in range(MAX_PEERS + 10):
        known.remember([announced(f"peer{i}")], NOW + i)
    assert len(known.addresses()) == MAX_PEERS
    assert known.addresses()[0].endswith(f"/p2p/peer{MAX_PEERS + 9}")


def test_unchanged_is_not_written(tmp_path):
    known = KnownPeers(tmp_path / "p.json")
    known.remember([announced("a")], NOW)
    known.save()
    known.path.unlink()
    known.remember([announced("a")], NOW + 5)
    known.save()
    assert not known.path.exists()


def test_damaged_file_is_an_empty_one(tmp_path):
    for content in (b"", b"\xff\x00", b"[1]", b'{"a": {"seen": "x"}}', bytes(1 << 19)):
        (tmp_path / "p.json").write_bytes(content)
        assert KnownPeers(tmp_path / "p.json").addresses() == []
