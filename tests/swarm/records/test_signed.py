from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.signed import OwnerSigned, Signable
from tests.swarm.society import OWNER, STRANGER, SWARM


class Note(Signable, frozen=True):
    swarm: Annotated[bytes, Meta(min_length=32, max_length=32)]
    text: str

    def rules(self) -> dict[str, bool]:
        return {"text": self.text.isprintable()}


def kind(name: str = "note") -> OwnerSigned[Note]:
    return OwnerSigned(name, Note, domain=f"tests {name} 1\n".encode(), max_bytes=200)


def test_what_was_signed_is_read_again():
    note = Note(SWARM, "hello")
    assert kind().open(kind().sign(note, OWNER), SWARM, OWNER.public) == note


@pytest.mark.parametrize(
    ("raw", "message", "code"),
    [
        (bytes(201), "a note of 201 bytes", ErrorCode.TOO_LARGE),
        (b"\xc1", "bad note: ", ErrorCode.MALFORMED),
        (kind().sign(Note(bytes(32), "hello"), OWNER), "this note is of another swarm", ErrorCode.WRONG_SWARM),
        (kind().sign(Note(SWARM, "hello"), STRANGER), "the owner did not sign this note", ErrorCode.REFUSED),
        (kind("letter").sign(Note(SWARM, "hello"), OWNER), "the owner did not sign this note", ErrorCode.REFUSED),
    ],
    ids=["too large", "not msgpack", "another swarm", "another key", "another kind"],
)
def test_refused(raw: bytes, message: str, code: ErrorCode):
    with pytest.raises(ProtocolError, match=message) as caught:
        kind().open(raw, SWARM, OWNER.public)
    assert caught.value.code is code


def test_what_breaks_a_rule_is_neither_signed_nor_read():
    bad = Note(SWARM, "line\nline")
    with pytest.raises(ValueError, match="note not valid: text"):
        kind().sign(bad, OWNER)
    body = msgspec.msgpack.encode(bad)
    raw = msgspec.msgpack.encode([body, OWNER.sign(b"tests note 1\n" + body)])
    with pytest.raises(ProtocolError, match="bad note: text"):
        kind().open(raw, SWARM, OWNER.public)
