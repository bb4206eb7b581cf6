"""Newcomer: fetches the swarm's manifest for a peer that has only an invite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, NetworkDown, PeerError, PeerLost, PeerRefused, ProtocolError
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.links.link_config import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.net.tasks import cancel_and_wait
from swarmnode.peer.questions import ask
from swarmnode.swarm.records.manifest import MAX_MANIFEST_BYTES, swarm_id

MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
NEXT_PEER_S = 0.2  # interval after which one more peer is asked, whether or not earlier ones have answered
TIMEOUT_S = 20.0


async def fetch_manifest(
    network: Network,
    peers: Sequence[PeerId],
    hello: Hello,
    config: LinkConfig,
    *,
    drop: Callable[[PeerId, str], None] = lambda _peer, _reason: None,
    timeout_s: float = TIMEOUT_S,
) -> bytes:
    """Return the swarm's manifest from the first of `peers` that gives the right one.

    `drop` is called with each peer that breaks the protocol (a wrong manifest, for example) and the reason. Raises PeerError if no
    peer gives the manifest within `timeout_s` seconds.
    """
    board = Switchboard(network, MANIFEST_PROTOCOL, hello, replace(config, max_payload_bytes=MAX_MANIFEST_BYTES))
    failure: PeerError = PeerRefused("no peer is known that could have the manifest", code=ErrorCode.NOT_FOUND)
    questions = [
        asyncio.ensure_future(_ask(board, peer, hello.swarm, number * NEXT_PEER_S)) for number, peer in enumerate(peers)
    ]
    try:
        for question in asyncio.as_completed(questions, timeout=timeout_s):
            try:
                return await question
            except ProtocolError as error:
                failure = error
                if error.peer is not None:
                    drop(error.peer, str(error))
            except PeerError as error:
                failure = error
        raise failure
    except asyncio.TimeoutError:
        raise PeerLost(f"no peer gave the manifest within {timeout_s:.0f} s") from failure
    finally:
        await cancel_and_wait(*questions)
        await board.close()


async def _ask(board: Switchboard, peer: PeerId, swarm: bytes, delay_s: float) -> bytes:
    await asyncio.sleep(delay_s)
    try:
        async for frame, body in ask(board, peer, GetManifest()):
            if isinstance(body, ManifestReply):
                if swarm_id(frame.payload) != swarm:
                    raise ProtocolError("it gave a manifest that is not the swarm's", peer=peer)
                return bytes(frame.payload)
    except NetworkDown as error:
        raise PeerLost(str(error), peer=peer) from error
    raise PeerRefused(f"peer {peer} has no manifest", code=ErrorCode.NOT_FOUND, peer=peer)
