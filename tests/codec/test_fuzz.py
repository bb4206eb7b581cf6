"""Hostile bytes: nothing comes out of the readers but frames, bodies and ProtocolError, and memory stays bounded."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.body import Body
from swarmnode.codec.frames import ALLOCATE_BYTES, HEADER, HEADER_BYTES, FrameKind, FrameReader, pack_header
from swarmnode.codec.messages import BODIES, decode_body, encode_body
from swarmnode.errors import ErrorCode, ProtocolError

CODES = {ErrorCode.MALFORMED, ErrorCode.TOO_LARGE}

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)


def decode_or_refuse(kind: int, data: bytes) -> Body | None:
    try:
        return decode_body(kind, data)
    except ProtocolError as error:
        assert error.code in CODES
        return None


@given(kind=st.integers(0, 255), data=st.binary(max_size=300))
def test_random_bytes_as_bodies(kind: int, data: bytes) -> None:
    decode_or_refuse(kind, data)


@given(kind=st.sampled_from(FrameKind), fields=st.lists(plain_values, max_size=12))
def test_random_fields_as_bodies(kind: FrameKind, fields: list[object]) -> None:
    body = decode_or_refuse(kind, msgspec.msgpack.encode(fields))
    if body is not None:
        assert decode_body(kind, encode_body(body)) == body


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(1, 60), max_size=10))
def test_random_bytes_as_a_stream(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(max_payload_bytes=100)
    position = 0
    try:
        for cut in [*cuts, len(data)]:
            for frame in reader.feed(data[position : position + cut]):
                assert len(frame.payload) <= 100
            position += cut
    except ProtocolError as error:
        assert error.code == ErrorCode.TOO_LARGE
        with pytest.raises(ProtocolError):
            list(reader.feed(b""))


frame_parts = st.tuples(
    st.sampled_from(FrameKind), st.binary(max_size=30), st.binary(max_size=90), st.integers(0, 9), st.integers(0, 9)
)


@given(parts=st.lists(frame_parts, max_size=8), cuts=st.lists(st.integers(1, 50), max_size=30))
def test_frames_survive_any_cutting(parts: list[tuple[FrameKind, bytes, bytes, int, int]], cuts: list[int]) -> None:
    data = b"".join(
        pack_header(k, len(body), len(load), channel, seq) + body + load for k, body, load, channel, seq in parts
    )
    reader, read, position = FrameReader(), [], 0
    for cut in [*cuts, len(data)]:
        read += list(reader.feed(data[position : position + cut]))
        position += cut
    assert [(f.kind, bytes(f.body), bytes(f.payload), f.channel, f.seq) for f in read] == parts
    assert reader.pending_bytes == 0


def test_a_header_alone_takes_no_memory() -> None:
    reader = FrameReader()
    tracemalloc.start()
    assert list(reader.feed(HEADER.pack(FrameKind.INPUT, 0, 0, reader.max_payload_bytes, 1, 0))) == []
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes <= ALLOCATE_BYTES + 100_000


@pytest.mark.parametrize("kind", [kind for kind, body in BODIES.items() if body.__struct_fields__])
def test_a_length_inside_a_body_takes_no_memory(kind: FrameKind) -> None:
    lies = (b"\xdd" + struct.pack(">I", 0xFFFFFFFF), b"\x92\x01\xc6" + struct.pack(">I", 0xFFFFFFFF))
    tracemalloc.start()
    for lie in lies:
        with pytest.raises(ProtocolError):
            decode_body(kind, lie)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    ("field", "value"), [("body", 1 << 16), ("payload", (1 << 28) + 1), ("channel", 1 << 32), ("seq", -1)]
)
def test_a_writer_refuses_what_does_not_fit_the_header(field: str, value: int) -> None:
    numbers = {"body": 0, "payload": 0, "channel": 0, "seq": 0, field: value}
    with pytest.raises(ValueError, match="frame"):
        pack_header(FrameKind.INPUT, numbers["body"], numbers["payload"], numbers["channel"], numbers["seq"])
    assert len(pack_header(FrameKind.INPUT, 0, 0)) == HEADER_BYTES
