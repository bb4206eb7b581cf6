"""Fetches training states from peers into the store of this machine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from swarmnode.codec.messages import Hello
from swarmnode.codec.state_messages import MAX_LISTED, MAX_STATE_BYTES, ListStates, StateEntry, States
from swarmnode.errors import (
    ErrorCode,
    LocalError,
    NetworkDown,
    PeerError,
    PeerRefused,
    ProtocolError,
    refusal,
)
from swarmnode.net.interfaces import Buffer, Network, PeerId
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.roles.fetching.chunk_server import weights_link
from swarmnode.roles.fetching.fetcher import Fetcher
from swarmnode.roles.fetching.sources import PeerSource, ask
from swarmnode.roles.training.checkpoints.state_server import STATE_PROTOCOL
from swarmnode.swarm.storage.content import CHUNK_BYTES, HASH_BYTES, FileContent, Progress
from swarmnode.swarm.storage.states import StateStore, file_name

log = logging.getLogger(__name__)

LISTING_S = 120.0  # for a list: the peer may have to write a snapshot of gigabytes first
IDLE_S = 5.0  # without anybody who gives what is missing, before all are asked anew what they have
AGAIN_S = 1.0  # between two such rounds
PEERS_AT_ONCE = 32

Version = tuple[int, bytes]
"""Size and root of a block's state. Replicas on unlike devices may have different ones of the same step."""


@dataclass(frozen=True)
class Listing:
    """What a peer says it has of a run."""

    run: bytes  # encoded
    entries: Sequence[StateEntry]

    @property
    def run_id(self) -> bytes:
        """32 bytes that name the run."""
        return hashlib.sha256(self.run).digest()

    @property
    def roots(self) -> frozenset[bytes]:
        """Of all states listed."""
        return frozenset(entry.root for entry in self.entries)


def state_board(network: Network, hello: Hello, config: LinkConfig) -> Switchboard:
    """The links for asking peers for states; the caller closes it."""
    longest = max(CHUNK_BYTES, MAX_STATE_BYTES // CHUNK_BYTES * HASH_BYTES)
    return Switchboard(network, STATE_PROTOCOL, hello, weights_link(config, longest))


async def list_states(board: Switchboard, peer: PeerId, blocks: Sequence[int] = (), *, at_least: int = 0) -> Listing:
    """What a peer has of these blocks (none: of all). Raises PeerLost, PeerRefused, ProtocolError, NetworkDown."""
    run = b""
    entries: list[StateEntry] = []
    async for _, body in ask(board, peer, ListStates(at_least, tuple(blocks)), silence_s=LISTING_S):
        if not isinstance(body, States) or (run and run != body.run):
            raise ProtocolError("a peer answered something else than its states", peer=peer)
        run = body.run
        entries += body.entries
        if len(entries) > MAX_LISTED:
            raise ProtocolError("a peer lists more states than there can be", code=ErrorCode.TOO_LARGE, peer=peer)
    return Listing(run, entries)


async def survey(
    board: Switchboard, peers: Iterable[PeerId], blocks: Sequence[int] = (), *, at_least: int = 0
) -> dict[PeerId, Listing]:
    """What these peers have; those that do not answer are left out."""
    turn = asyncio.Semaphore(PEERS_AT_ONCE)

    async def look(peer: PeerId) -> Listing | None:
        async with turn:
            try:
                return await list_states(board, peer, blocks, at_least=at_least)
            except (PeerError, NetworkDown) as error:
                log.debug("no states from %s: %s", peer, error)
                return None

    asked = list(dict.fromkeys(peers))
    listings = await asyncio.gather(*map(look, asked))
    return {peer: listing for peer, listing in zip(asked, listings, strict=True) if listing is not None}


def choose(
    entries: Iterable[StateEntry], blocks: Collection[int], *, begun: Collection[int] = ()
) -> tuple[int, dict[int, Version]] | None:
    """The step to fetch, and which version of each block; None where no step has all blocks.

    It is the newest one, unless a fetch of another one was begun. Of several versions the one that most peers have.
    """
    votes: dict[int, dict[int, Counter[Version]]] = {}
    for entry in entries:
        votes.setdefault(entry.step, {}).setdefault(entry.block, Counter())[entry.size, entry.root] += 1
    possible = [step for step, of in votes.items() if all(block in of for block in blocks)]
    if not possible:
        return None
    step = max(possible, key=lambda step: (step in begun, step))
    return step, {block: _most(votes[step][block]) for block in blocks}


def _most(votes: Counter[Version]) -> Version:
    return max(votes, key=lambda version: (votes[version], version))


class StateSource(PeerSource):
    """A peer that listed these roots; for others it is not even asked."""

    def __init__(self, board: Switchboard, peer: PeerId, roots: Set[bytes]) -> None:
        super().__init__(board, peer)
        self._roots = roots

    async def hashes(self, file: FileContent) -> Buffer:
        self._check(file)
        return await super().hashes(file)

    def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        self._check(file)
        return super().chunks(file, first, count)

    def _check(self, file: FileContent) -> None:
        if file.root not in self._roots:
            raise refusal(ErrorCode.NOT_FOUND, peer=self.name)


async def fetch_states(
    board: Switchboard,
    peers: Callable[[], Iterable[PeerId]],
    blocks: Collection[int],
    *,
    into: StateStore,
    step: int | None = None,
    at_least: int = 0,
    patience_s: float = 60.0,
    progress: Progress | None = None,
) -> int:
    """Fetch one step of all these blocks from the peers of the store's run; which step it was.

    `step` says which one; else it is the newest that the peers have together, not older than `at_least` (where all are, they
    are asked to write down the step that they are at), unless a fetch of another such step was begun and is still possible.
    A lost peer's part comes from others; what came stays on the disk for the next attempt. Raises PeerRefused (NOT_FOUND)
    after `patience_s` without a byte, LocalError where the disk is full.
    """
    fetch = _Fetch(board, peers, tuple(sorted(blocks)), into, step, at_least)
    idle_since = asyncio.get_running_loop().time()
    while True:
        listings = await fetch.listings()
        chosen = fetch.choose(listings)
        if chosen is not None:
            before = fetch.fetched_bytes
            if await fetch.bring(*chosen, listings, progress):
                return chosen[0]
            if fetch.fetched_bytes > before:
                idle_since = asyncio.get_running_loop().time()
        if asyncio.get_running_loop().time() - idle_since > patience_s:
            what = "state" if step is None else f"state of step {step}"
            raise PeerRefused(f"the peers have no {what} of all units {list(fetch.blocks)}", code=ErrorCode.NOT_FOUND)
        await asyncio.sleep(AGAIN_S)


class _Fetch:
    """What stays the same over the rounds of a fetch."""

    def __init__(
        self,
        board: Switchboard,
        peers: Callable[[], Iterable[PeerId]],
        blocks: tuple[int, ...],
        into: StateStore,
        step: int | None,
        at_least: int,
    ) -> None:
        self.blocks = blocks
        self.fetched_bytes = 0
        self._board = board
        self._peers = peers
        self._into = into
        self._step = step
        self._at_least = at_least
        self._ask_for = at_least if step is None else 0
        self._liars: set[PeerId] = set()
        self._failed: set[Version] = set()  # listed, and then not given

    def __repr__(self) -> str:
        return f"<_Fetch of units {list(self.blocks)} into {self._into!r}, {len(self._liars)} peers dropped>"

    async def listings(self) -> dict[PeerId, Listing]:
        """What the honest peers have of our run."""
        asked = [peer for peer in self._peers() if peer not in self._liars]
        found = await survey(self._board, asked, self.blocks, at_least=self._ask_for)
        return {peer: listing for peer, listing in found.items() if listing.run_id == self._into.run.id}

    def choose(self, listings: Mapping[PeerId, Listing]) -> tuple[int, dict[int, Version]] | None:
        """What to fetch now, if possible nothing that nobody gave before."""
        entries = [entry for listing in listings.values() for entry in listing.entries]
        wanted = [entry for entry in entries if self._step in (None, entry.step) and entry.step >= self._at_least]
        untried = [entry for entry in wanted if (entry.size, entry.root) not in self._failed]
        begun = self._into.begun()
        chosen = choose(untried, self.blocks, begun=begun)
        if chosen is None:
            self._failed.clear()
            chosen = choose(wanted, self.blocks, begun=begun)
        if chosen is None and self._ask_for:
            # Each wrote down its own step: those behind shall come up to the others.
            self._ask_for = max([self._ask_for, *(entry.step for entry in entries)])
        return chosen

    async def bring(
        self,
        step: int,
        versions: Mapping[int, Version],
        listings: Mapping[PeerId, Listing],
        progress: Progress | None,
    ) -> bool:
        """Fetch these versions, and take the step into the store; False where nobody gives what is missing."""
        files = {
            block: FileContent(f"{file_name(block)}-{root.hex()[:16]}", size, root)
            for block, (size, root) in versions.items()
        }
        sources = [StateSource(self._board, peer, listing.roots) for peer, listing in listings.items()]
        incoming = self._into.incoming(step)
        fetcher = Fetcher(incoming, lambda: sources, lambda *_: None)
        wanted = {file: range(file.chunks()) for file in files.values()}
        try:
            await fetcher.fetch(wanted, news=_never, progress=progress, patience_s=IDLE_S)
        except PeerRefused as error:
            log.info("%s; asking anew who has what", error)
            for file in wanted:
                if await asyncio.to_thread(incoming.missing, file, wanted[file]):
                    self._failed.add((file.size, file.root))
            return False
        except LocalError:
            self._into.give_up(step)
            raise
        finally:
            self._liars |= fetcher.liars
            self.fetched_bytes += fetcher.fetched_bytes
        await asyncio.to_thread(self._into.take_in, step, files)
        return True


async def _never() -> None:
    await asyncio.Event().wait()
