"""The first frame of each side of a link, and what it must say."""

from __future__ import annotations

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import VERSION, Error, Hello, decode_body
from swarmnode.errors import ErrorCode, ProtocolError, refusal
from swarmnode.net.interfaces import PeerId


def read_greeting(frame: Frame, peer: PeerId) -> Hello:
    """What a peer's first frame says. Raises ProtocolError where it is no HELLO, PeerRefused where it is a refusal."""
    body = decode_body(frame.kind, frame.body) if frame.kind in (FrameKind.HELLO, FrameKind.ERROR) else None
    if isinstance(body, Error):
        raise refusal(body.code, retry_s=body.retry_s, peer=peer)
    if not isinstance(body, Hello):
        raise ProtocolError("the first frame of a link must be HELLO", peer=peer)
    return body


def check_greeting(theirs: Hello, ours: Hello, peer: PeerId) -> None:
    """Raises ProtocolError where the peer is of another version or swarm."""
    if theirs.version != VERSION:
        text = f"peer {peer} speaks version {theirs.version} of the protocol, we speak {VERSION}; one must upgrade"
        raise ProtocolError(text, code=ErrorCode.VERSION, peer=peer)
    if theirs.swarm != ours.swarm:
        raise ProtocolError(f"peer {peer} belongs to another swarm", code=ErrorCode.WRONG_SWARM, peer=peer)
