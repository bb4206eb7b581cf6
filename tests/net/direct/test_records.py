"""Records as hostile networks may change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmnode.errors import ProtocolError
from swarmnode.net.direct.direct_stream import (
    HEAD,
    MAX_CONTENT_BYTES,
    MAX_RECORD_BYTES,
    READ_BYTES,
    TAG_BYTES,
    DirectionKey,
    RecordReader,
    contents,
)

KEY = bytes(range(32))


def feed(reader: RecordReader, data: bytes, piece_bytes: int = MAX_RECORD_BYTES) -> list[bytes]:
    """What a reader makes of bytes that come in pieces."""
    opened = []
    while data:
        room = reader.room()
        count = min(len(room), len(data), piece_bytes)
        room[:count] = data[:count]
        opened += list(reader.advance(count))
        data = data[count:]
    return opened


def sealed(*each: bytes) -> list[bytes]:
    key = DirectionKey(KEY)
    return [b"".join(key.seal(content)) for content in each]


@pytest.mark.parametrize("piece_bytes", [1, 3, 20, 1000, MAX_RECORD_BYTES, READ_BYTES])
def test_contents_come_out_whole_however_their_bytes_come(piece_bytes: int) -> None:
    said = [b"a", b"", b"bc" * 100, b"d" * 2000]
    assert feed(RecordReader(DirectionKey(KEY)), b"".join(sealed(*said)), piece_bytes) == said


def test_the_largest_record_fits() -> None:
    large = bytes(range(256)) * (MAX_CONTENT_BYTES // 256)
    assert feed(RecordReader(DirectionKey(KEY)), b"".join(sealed(b"small", large, large))) == [b"small", large, large]


def altered(records: list[bytes]) -> list[bytes]:
    return [records[0][:6] + bytes([records[0][6] ^ 1]) + records[0][7:], *records[1:]]


def longer(records: list[bytes]) -> list[bytes]:
    return [HEAD.pack(HEAD.unpack_from(records[0])[0] + 1) + records[0][HEAD.size :], *records[1:]]


HOSTILE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit altered": altered,
    "a length altered": longer,
    "two exchanged": lambda records: [records[1], records[0]],
    "one repeated": lambda records: [records[0], records[0], records[1]],
    "one left out": lambda records: records[1:],
    "too long": lambda _records: [HEAD.pack(MAX_CONTENT_BYTES + TAG_BYTES + 1)],
    "four gigabytes": lambda _records: [b"\xff" * HEAD.size],
    "shorter than its tag": lambda _records: [HEAD.pack(TAG_BYTES - 1)],
    "of another key": lambda _records: [b"".join(DirectionKey(bytes(32)).seal(b"first"))],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_that_was_tampered_with_does_not_open(name: str) -> None:
    records = HOSTILE[name](sealed(b"first", b"second"))
    with pytest.raises(ProtocolError):
        feed(RecordReader(DirectionKey(KEY)), b"".join(records))


def test_both_sides_take_the_next_key_at_the_same_record() -> None:
    seals, opens = DirectionKey(KEY, renew_after=2), RecordReader(DirectionKey(KEY, renew_after=2))
    said = [b"%d" % number for number in range(7)]
    records = [b"".join(seals.seal(content)) for content in said]
    assert feed(opens, b"".join(records)) == said
    assert records[0] != b"".join(DirectionKey(KEY).seal(b"2")), "a nonce was used twice with one key"
    with pytest.raises(ProtocolError):
        feed(RecordReader(DirectionKey(KEY)), b"".join(records))


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1, 0, 2), (16, 200), (MAX_CONTENT_BYTES, 5), (3, 3 * MAX_CONTENT_BYTES + 7, 9)]
)
def test_buffers_become_contents_in_order_and_within_the_bound(sizes: tuple[int, ...]) -> None:
    buffers = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    pieces = list(contents(buffers))
    assert b"".join(pieces) == b"".join(buffers)
    assert all(0 < len(piece) <= MAX_CONTENT_BYTES for piece in pieces)
    assert len(pieces) <= sum(sizes) // MAX_CONTENT_BYTES + 2
