import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import UsageError
from swarmnode.swarm.records.invite import Invite, decode_invite, encode_invite, looks_like_invite

INVITE = Invite(
    bytes(range(32)), "test", ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWxyz", "/dns4/example.org/tcp/1/p2p/Qm1")
)


def test_round_trip():
    line = encode_invite(INVITE)
    assert line.startswith("swarm1") and line.isalnum() and line == line.lower()
    assert decode_invite(line) == INVITE
    assert looks_like_invite(line)


def test_case_and_line_breaks_do_not_matter():
    line = encode_invite(INVITE).upper()
    assert decode_invite(f"  {line[:40]}\n{line[40:]} ") == INVITE


@given(st.data())
def test_every_typo_is_found(data):
    line = encode_invite(INVITE)
    at = data.draw(st.integers(6, len(line) - 1))
    character = data.draw(st.sampled_from(sorted(set("abcdefghijklmnopqrstuvwxyz234567") - {line[at]})))
    damaged = line[:at] + character + line[at + 1 :]
    try:
        assert decode_invite(damaged) == INVITE  # only the unused bits of the last character may differ
        assert at == len(line) - 1
    except UsageError as error:
        assert "damaged" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "not an invite"),
        ("swarm3abcdef", "upgrade"),
        ("swarm1", "damaged"),
        ("swarm1abc", "damaged"),
        ("swarm1!!!!", "damaged"),
        ("swarm1" + "a" * 9000, "characters"),
    ],
)
def test_messages(text, message):
    with pytest.raises(UsageError, match=message):
        decode_invite(text)


def test_bounds():
    for bad in (
        Invite(b"short", "test"),
        Invite(bytes(32), ""),
        Invite(bytes(32), "x", ("127.0.0.1:4001",)),
        Invite(bytes(32), "x", ("/a",) * 17),
    ):
        with pytest.raises(UsageError, match="not valid"):
            encode_invite(bad)


def test_a_path_is_not_an_invite():
    for path in ("my.swarm", "./swarm1", "swarm1.swarm", "/tmp/swarm1x", "swarm", "swarmtest"):
        assert not looks_like_invite(path)
