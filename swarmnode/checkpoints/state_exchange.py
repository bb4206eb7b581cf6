"""Training states of peers: their listings, and fetching of states from several sources into a store on this machine.

State server: it sends the training states on this disk to any peer that asks (`protocol/frames.md`, "A state's way").
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from swarmnode.checkpoints.votes import ChosenStep, Electorate, SecondVoice, Version, Votes, all_named, named
from swarmnode.codec.body import Body
from swarmnode.codec.messages import MAX_ENTRIES, MAX_LISTED, MAX_STATE_BYTES, GetChunks, ListStates, StateEntry, States
from swarmnode.errors import (
    CheckpointError,
    ErrorCode,
    LocalError,
    NetworkDown,
    PeerError,
    PeerRefused,
    ProtocolError,
    SwarmnodeError,
    refusal,
)
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.questions import LocalPeer, ask
from swarmnode.swarm.records.run import Run, decode_run, encode_run
from swarmnode.swarm.storage.content import CHUNK_BYTES, HASH_BYTES, FileContent, Progress, matching_hashes
from swarmnode.swarm.storage.state_store import BackupFolder, StateStore, file_name
from swarmnode.weights.chunk_server import ChunkServer, Offer
from swarmnode.weights.fetcher import Fetcher
from swarmnode.weights.sources import PeerSource, Source

log = logging.getLogger(__name__)

STATE_PROTOCOL = "/swarmnode/state/1"
HOLD_S = 60.0  # a requested step is kept for this time
FRESH_EVERY_S = 1.0  # shortest time between two snapshots that peers ask for
FRESH_SHARE = 0.05  # largest share of the time for snapshots that peers ask for; any peer may ask

Fresh = Callable[[int], Awaitable[int]]
"""Function (at_least) that writes a snapshot of the stage's step to the disk, unless it is there, and returns the step.

If the stage reaches the step `at_least` soon, it waits for that one. Raises LocalError if there is nothing to write.
"""


class StateServer(ChunkServer):
    """Server of this node's own training states, set by `give`, and of the `backups` that it keeps for other peers."""

    questions = (ListStates,)

    def __init__(self, peer: LocalPeer, backups: BackupFolder | None = None) -> None:
        super().__init__(peer, (STATE_PROTOCOL,))
        self._backups = backups
        self._store: StateStore | None = None
        self._fresh: Fresh | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._fresh_again_at = 0.0

    def give(self, store: StateStore | None, fresh: Fresh | None = None) -> None:
        """Serve the states of `store` instead of those of the previous one; None serves no own states. `fresh` makes
        snapshots for peers that ask for a newer step than the disk has."""
        self._store, self._fresh = store, fresh
        self._forget_offers()

    async def _send(self, channel: Channel, body: Body) -> ErrorCode | None:
        if isinstance(body, ListStates):
            await self._list(channel, body)
            return None
        assert isinstance(body, GetChunks)
        self._offer(body.root)
        return await super()._send(channel, body)

    # -- listings

    async def _list(self, channel: Channel, question: ListStates) -> None:
        """Send the list of states that the question asks for, newest step first, after a snapshot if it asks for a newer step.
        If there are more than MAX_LISTED, the oldest are left out."""
        run = self._run_asked_for(question)
        if self._store is not None and self._store.run == run:
            await self._make_fresh(self._store, question.at_least)
        self._forget_offers()
        entries = () if run is None else self._entries(run)
        wanted = (entry for entry in entries if not question.blocks or entry.block in question.blocks)
        listed = tuple(islice(wanted, MAX_LISTED))
        encoded = b"" if run is None else encode_run(run)
        for first in range(0, max(1, len(listed)), MAX_ENTRIES):
            channel.send(States(encoded, listed[first : first + MAX_ENTRIES]))
            await channel.drain()

    def _run_asked_for(self, question: ListStates) -> Run | None:
        """Return the run that the question names, if states of it are here, else None.

        A question that names no run gets the stage's run, else the run of most backups, else None.
        """
        own = None if self._store is None else self._store.run
        if not question.run:
            return own or (None if self._backups is None else self._backups.run())
        if own is not None and own.id == question.run:
            return own
        kept = None if self._backups is None else next(self._backups.of_run(question.run), None)
        return None if kept is None else kept.run

    def _entries(self, run: Run) -> list[StateEntry]:
        """Return the entries of all states of a run on this disk, newest step first."""
        own = [] if self._store is None or self._store.run != run else listed_of(self._store)
        kept = [] if self._backups is None else self._backups.of_run(run.id)
        backups = [entry for store in kept for entry in listed_of(store, backup=True)]
        return sorted([*own, *backups], key=lambda entry: -entry.step)

    async def _make_fresh(self, store: StateStore, at_least: int) -> None:
        """Make a snapshot if the newest step is older than `at_least`, and keep the newest step for HOLD_S."""
        newest = store.newest()
        if newest is None or newest < at_least:
            await self._refresh(at_least)
        newest = store.newest()
        if newest is not None:
            store.hold(newest, HOLD_S)

    async def _refresh(self, at_least: int) -> None:
        """Write a snapshot of the training state of step `at_least` or later. Requests that arrive meanwhile wait for the same
        snapshot."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self._tasks.spawn(self._make_snapshot(at_least), "snapshot")
        await asyncio.shield(self._refreshing)

    async def _make_snapshot(self, at_least: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._fresh_again_at - loop.time())
        began_s = loop.time()
        try:
            if self._fresh is not None:
                await self._fresh(at_least)
        except SwarmnodeError as error:
            log.warning("your node cannot make a snapshot for a peer: %s", error)
        took_s = loop.time() - began_s
        self._fresh_again_at = loop.time() + max(FRESH_EVERY_S, took_s / FRESH_SHARE)

    # -- chunks

    def _offer(self, root: bytes) -> None:
        """Put the file with this root on offer and keep its step for HOLD_S; if it is gone, withdraw it."""
        found = self._find(root)
        if found is None:
            self._offers.pop(root, None)
            return
        store, step, _block, file, path = found
        store.hold(step, HOLD_S)
        self._offers.setdefault(root, Offer(file, path))

    def _find(self, root: bytes) -> tuple[StateStore, int, int, FileContent, Path] | None:
        """Find the file with this root among the stage's own states and the backups. Returns None if it is not here."""
        found = None if self._store is None else self._store.find(root)
        if self._store is not None and found is not None:
            return self._store, *found
        return None if self._backups is None else self._backups.find(root)

    def _forget_offers(self) -> None:
        """Offer the states of removed steps to other peers no longer."""
        for root in [root for root in self._offers if self._find(root) is None]:
            del self._offers[root]
            self._hashing.pop(root, None)

    def _withdraw(self, offer: Offer, reason: str) -> None:
        super()._withdraw(offer, reason)
        found = self._find(offer.file.root)
        if found is not None:
            store, step, block, _file, _path = found
            store.set_aside(step, block)


def listed_of(store: StateStore, *, backup: bool = False) -> list[StateEntry]:
    """Return entries for all training states in a store. `backup` marks them as kept for another peer."""
    return [
        StateEntry(step, block, file.size, file.root, backup)
        for step in store.steps()
        for block, file in store.files(step).items()
    ]


LISTING_S = 120.0  # for a list, if the peer may first have to write a snapshot of gigabytes
KNOWN_S = 15.0  # for a list of the states on its disk
IDLE_S = 5.0  # without a source for a missing part, before all peers are asked again for their lists
AGAIN_S = 1.0  # between two such rounds
PEERS_AT_ONCE = 32
MAX_AHEAD = 64
NAME = "this machine"


class LocalSource(Source):
    """Source of chunks that reads the training states which this machine keeps for other peers."""

    def __init__(self, backups: BackupFolder) -> None:
        self.name = NAME
        self._backups = backups

    async def hashes(self, file: FileContent) -> Buffer:
        path = self._path(file)
        try:
            hashes = await asyncio.to_thread(matching_hashes, path, file)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check the disk") from error
        if hashes is None:
            raise CheckpointError(f"{path} was changed or damaged; other peers have copies")
        return hashes

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        path = self._path(file)
        try:
            for number in range(first, first + count):
                yield number, await asyncio.to_thread(_read, path, number)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check the disk") from error

    def _path(self, file: FileContent) -> Path:
        found = self._backups.find(file.root)
        if found is None:
            raise CheckpointError(f"{file.name} is not among the backups on this node; ask another peer")
        return found[-1]


def _read(path: Path, number: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(number * CHUNK_BYTES)
        return stream.read(CHUNK_BYTES)


@dataclass(frozen=True)
class Listing:
    """The states of a run that a peer says it has."""

    run: bytes  # encoded
    entries: Sequence[StateEntry]

    @property
    def run_id(self) -> bytes:
        """Id of the training run, 32 bytes."""
        return hashlib.sha256(self.run).digest()

    @property
    def roots(self) -> frozenset[bytes]:
        """Hashes that identify the listed states."""
        return frozenset(entry.root for entry in self.entries)


def state_board(peer: LocalPeer) -> Switchboard:
    """Return the links for asking peers for states; the caller closes them."""
    longest = max(CHUNK_BYTES, MAX_STATE_BYTES // CHUNK_BYTES * HASH_BYTES)
    return Switchboard(peer.network, STATE_PROTOCOL, peer.hello, replace(peer.link_config, max_payload_bytes=longest))


async def list_states(
    board: Switchboard, peer: PeerId, blocks: Sequence[int] = (), *, at_least: int = 0, run_id: bytes = b""
) -> Listing:
    """Ask a peer which states it has of these blocks (empty: of all), of the run `run_id` (empty: of its own).

    If it has no step of its own run as late as `at_least`, it
    first stores its current one. Raises PeerLost, PeerRefused, NetworkDown, or ProtocolError if the
    answer is malformed or too long, or lists states of no valid run or of steps beyond the run's end.
    """
    run = b""
    entries: list[StateEntry] = []
    silence_s = LISTING_S if at_least else KNOWN_S
    async for _, body in ask(board, peer, ListStates(at_least, tuple(blocks), run_id), silence_s=silence_s):
        if not isinstance(body, States) or (run and run != body.run):
            raise ProtocolError("it sent something other than a list of states", peer=peer)
        run = body.run
        entries += body.entries
        if len(entries) > MAX_LISTED:
            raise ProtocolError("it lists more states than allowed", code=ErrorCode.TOO_LARGE, peer=peer)
    if entries and max(entry.step for entry in entries) > decode_run(run).steps:
        raise ProtocolError("it lists a step beyond the end of its run", peer=peer)
    return Listing(run, entries)


async def survey(
    board: Switchboard, peers: Iterable[PeerId], blocks: Sequence[int] = (), *, at_least: int = 0, run_id: bytes = b""
) -> dict[PeerId, Listing]:
    """Ask these peers for their states, as `list_states`. Peers that do not answer are left out."""
    turn = asyncio.Semaphore(PEERS_AT_ONCE)

    async def read_listing(peer: PeerId) -> Listing | None:
        async with turn:
            try:
                return await list_states(board, peer, blocks, at_least=at_least, run_id=run_id)
            except (PeerError, NetworkDown) as error:
                log.debug("no states from %s: %s", peer, error)
                return None

    asked = list(dict.fromkeys(peers))
    listings = await asyncio.gather(*map(read_listing, asked))
    return {peer: listing for peer, listing in zip(asked, listings, strict=True) if listing is not None}


class StateSource(PeerSource):
    """A peer as a source of the states that it listed. A request for any other root fails without asking it."""

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
    backups: BackupFolder | None = None,
    patience_s: float = 60.0,
    progress: Progress | None = None,
    whole: bool = False,
    electorate: Callable[[], Electorate] = Electorate,
    on_unconfirmed: Callable[[Sequence[int]], None] | None = None,
) -> int:
    """Fetch one step of all `blocks`, in the run of the store, from the peers, and return its number.

    A version of a block counts if more than half of the block's holders have it (`votes.py`). The chunks of a lost peer
    come from others. Fetched chunks stay on the disk for the next attempt.

    Args:
        step: fetches this step. None takes the newest step that the peers have together, or one whose fetch has begun and
            is still possible.
        at_least: the oldest acceptable step; if it is above 0, the peers are asked to write snapshots.
        backups: this machine's backups; they count as a peer's.
        patience_s: how long to go on without receiving a byte.
        whole: compares versions with different roots value by value instead of by samples, and those of holders that are
            outvoted, too.
        on_unconfirmed: is called with the blocks that only one holder vouches for, or of which, with `whole`, another holder
            has a state that differs by more than rounding; None logs them.

    Raises:
        PeerRefused: (NOT_FOUND) after `patience_s`.
        LocalError: if the disk is full.
    """
    fetch = _Fetch(board, peers, tuple(sorted(blocks)), into, step, at_least, whole, backups)
    idle_since = asyncio.get_running_loop().time()
    while True:
        listings = await fetch.listings()
        votes = Votes({peer: listing.entries for peer, listing in listings.items()}, electorate())
        chosen = fetch.choose(votes)
        if chosen is not None:
            before = fetch.fetched_bytes
            if await fetch.bring(chosen, votes, listings, progress):
                if unconfirmed := sorted({*chosen.unconfirmed, *fetch.disputed}):
                    if on_unconfirmed is None:
                        parts = ", ".join(all_named(unconfirmed))
                        log.warning("step %d: no other peer confirms the state of %s", chosen.step, parts)
                    else:
                        on_unconfirmed(unconfirmed)
                return chosen.step
            if fetch.fetched_bytes > before:
                idle_since = asyncio.get_running_loop().time()
        if asyncio.get_running_loop().time() - idle_since > patience_s:
            what = "state" if step is None else f"state of step {step}"
            text = (
                f"the peers have no {what} of all layers {list(fetch.blocks)} "
                "that more than half of a layer's holders agree on"
            )
            differ = votes.disagreement(fetch.blocks)
            raise PeerRefused(text if differ is None else f"{text}: {differ}", code=ErrorCode.NOT_FOUND)
        await asyncio.sleep(AGAIN_S)


@dataclass(repr=False)
class _Fetch:
    """Arguments and progress of one call of `fetch_states`."""

    board: Switchboard
    peers: Callable[[], Iterable[PeerId]]
    blocks: tuple[int, ...]
    into: StateStore
    step: int | None
    at_least: int
    whole: bool
    backups: BackupFolder | None
    fetched_bytes: int = 0

    def __post_init__(self) -> None:
        self._ask_for = self.at_least if self.step is None else 0
        self._ahead = 0  # steps: if peers advance faster than they are asked, they meet at a future step
        self._liars: set[PeerId] = set()
        self._second_voice = SecondVoice(whole=self.whole)
        self._failed: set[Version] = set()  # were listed, but then not sent or not confirmed
        self.disputed: set[int] = set()  # blocks of which a voter has a state that is no other rounding

    def __repr__(self) -> str:
        return f"<_Fetch of units {list(self.blocks)} into {self.into!r}, {len(self._liars)} peers dropped>"

    async def listings(self) -> dict[PeerId, Listing]:
        """Return the listings of this run from peers that have not lied; this machine's backups count as one."""
        left = self._liars | self._second_voice.mute
        asked = [peer for peer in self.peers() if peer not in left]
        run_id = self.into.run.id
        found = await survey(self.board, asked, self.blocks, at_least=self._ask_for, run_id=run_id)
        if self.backups is not None and NAME not in left:
            found[NAME] = listing_of(self.backups, self.into.run)
        return {peer: listing for peer, listing in found.items() if listing.run_id == run_id}

    def choose(self, votes: Votes) -> ChosenStep | None:
        """Choose the step and versions to fetch, preferably none that failed before. Returns None if there is none.

        Without a choice, a fetch with `at_least` asks for a later step in the next round, at which the peers can meet.
        """
        begun = self.into.begun()
        for failed in (self._failed, ()):
            chosen = votes.choose(self.blocks, at_least=self.at_least, step=self.step, begun=begun, failed=failed)
            if chosen is not None:
                return chosen
            self._failed.clear()
        if self._ask_for:
            # Each peer wrote its own step: those behind shall catch up with the others.
            self._ask_for = max(self._ask_for, votes.reached(self.blocks)) + self._ahead
            self._ahead = min(MAX_AHEAD, 2 * self._ahead or 1)
        return None

    async def bring(
        self, chosen: ChosenStep, votes: Votes, listings: Mapping[PeerId, Listing], progress: Progress | None
    ) -> bool:
        """Fetch the chosen versions and move the step into the store.

        Returns False if no source sends or confirms a missing part. Raises LocalError if the disk is full.
        """
        files = {block: file_of(block, version) for block, version in chosen.versions.items()}
        sources = {peer: self._source(peer, listing) for peer, listing in listings.items()}
        incoming = self.into.incoming(chosen.step)
        fetcher = Fetcher(incoming, lambda: list(sources.values()), lambda *_: None)
        wanted = {file: range(file.chunks()) for file in files.values()}
        try:
            await fetcher.fetch(wanted, news=_never, progress=progress, patience_s=IDLE_S)
        except PeerRefused as error:
            log.info("%s; your node asks all peers again for their lists", error)
            for file in wanted:
                if await asyncio.to_thread(incoming.missing, file, wanted[file]):
                    self._failed.add((file.size, file.root))
            return False
        except LocalError:
            self.into.give_up(chosen.step)
            raise
        finally:
            self._liars |= fetcher.liars
            self.fetched_bytes += fetcher.fetched_bytes
        for block, lacking in chosen.lacking.items():
            others = [(sources[peer], file_of(block, own)) for peer, own in votes.others(chosen, block).items()]
            if not await self._second_voice.confirmed(incoming, files[block], others, lacking):
                log.warning("no other peer confirms a version of layer %d at step %d", block, chosen.step)
                self._failed.add(chosen.versions[block])
                return False
        self.disputed.clear()
        for peer, differing in votes.dissenters(chosen).items():
            for block, version in differing.items() if self.whole else ():
                theirs = (sources[peer], file_of(block, version))
                if not await self._second_voice.confirmed(incoming, files[block], [theirs], 1):
                    self.disputed.add(block)
            units = ", ".join(map(named, differing))
            text = "peer %s has another state of %s at step %d than most holders: its device rounds differently, or it lies"
            log.log(logging.WARNING if self.whole else logging.INFO, text, peer, units, chosen.step)
        await asyncio.to_thread(self.into.complete, chosen.step, files)
        return True

    def _source(self, peer: PeerId, listing: Listing) -> Source:
        here = self.backups if peer == NAME else None
        return StateSource(self.board, peer, listing.roots) if here is None else LocalSource(here)


def listing_of(backups: BackupFolder, run: Run) -> Listing:
    """Return the list of a run's training states that this machine keeps for other peers."""
    entries = [entry for store in backups.of_run(run.id) for entry in listed_of(store, backup=True)]
    return Listing(encode_run(run), entries)


def file_of(block: int, version: Version) -> FileContent:
    """Return the file of one version of a block's state during a fetch. Its name contains the root, since several versions
    may be fetched."""
    size, root = version
    return FileContent(f"{file_name(block)}-{root.hex()[:16]}", size, root)


async def _never() -> None:
    await asyncio.Event().wait()
