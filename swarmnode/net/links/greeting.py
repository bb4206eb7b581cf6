"""The first frame of each side of a link, and what it must say."""

from __future__ import annotations

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import Error, Hello, decode_body
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
    """Raises ProtocolError where the peer and we have no version in common, or it is of another swarm."""
    (oldest, newest), (our_oldest, our_newest) = theirs.spoken, ours.spoken
    if newest < our_oldest or our_newest < oldest:
        spoken = newest if newest < our_oldest else oldest
        text = f"peer {peer} speaks version {spoken} of the protocol, we speak {our_newest}; one must upgrade"
        raise ProtocolError(text, code=ErrorCode.VERSION, peer=peer)
    if theirs.swarm != ours.swarm:
        raise ProtocolError(f"peer {peer} belongs to another swarm", code=ErrorCode.WRONG_SWARM, peer=peer)
