"""Export: the newest step that the swarm's peers have together is found in their listings and written as a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarmnode.checkpoints.state_exchange import NAME, Listing, fetch_states, listing_of, state_board, survey
from swarmnode.checkpoints.votes import Electorate, Votes, all_named
from swarmnode.codec.body import SHARED
from swarmnode.codec.messages import StateEntry
from swarmnode.compute.training.snapshot import gather, write_language_model, write_module
from swarmnode.errors import ErrorCode, PeerRefused, ProtocolError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.swarm.records.manifest import CAUSAL_LM
from swarmnode.swarm.records.run import Run, decode_run
from swarmnode.swarm.storage.content import Progress
from swarmnode.swarm.storage.small_files import UNCONFIRMED_FILE, check_free, new_folder
from swarmnode.swarm.storage.state_store import BackupFolder, StateStore
from swarmnode.weights.weights import Weights

AGAIN_S = 1.0
PATIENCE_S = 30.0  # for peers to turn up that have all units


@dataclass(frozen=True)
class WholeStep:
    """A step of a run, and the blocks that the model has in it."""

    run: Run
    step: int
    blocks: tuple[int, ...]


def whole_step(
    listings: Mapping[PeerId, Listing], units: int, electorate: Electorate = Electorate()
) -> WholeStep | None:
    """Return the newest step, at which enough holders list every block, of the run that `runs_by_votes` puts first; None if there
    is none."""
    found = of_one_run(listings, electorate)
    if found is None:
        return None
    run, of_it = found
    shares = any(entry.block == SHARED for entries in of_it.values() for entry in entries)
    blocks = (*((SHARED,) if shares else ()), *range(units))
    chosen = Votes(of_it, electorate).choose(blocks)
    return None if chosen is None else WholeStep(run, chosen.step, blocks)


async def find_whole_step(
    board: Switchboard,
    peers: Callable[[], Iterable[PeerId]],
    blocks: Collection[int],
    units: int,
    backups: BackupFolder | None,
    electorate: Callable[[], Electorate] = Electorate,
) -> WholeStep | None:
    """Find the newest whole step for a node that wants `blocks`. Returns None if there is none.

    Perhaps only backups of these blocks are left: the peers are then asked for the step of the backups, so that all parts
    are of one step.
    """
    listings = await survey(board, peers(), tuple(blocks))
    found = of_one_run(_with_own(listings, backups, electorate()), electorate())
    if found is None:
        return None
    run, of_it = found
    chosen = Votes(of_it, electorate()).choose(blocks)
    listings = await survey(board, peers(), at_least=0 if chosen is None else chosen.step, run_id=run.id)
    if backups is not None:
        listings[NAME] = listing_of(backups, run)
    return whole_step(listings, units, electorate())


def _with_own(
    listings: Mapping[PeerId, Listing], backups: BackupFolder | None, electorate: Electorate
) -> dict[PeerId, Listing]:
    """Return the listings of the peers and, under `NAME`, that of this machine's `backups`: of the peers' run, or of the run of
    most writers if the peers list no run."""
    found = of_one_run(listings, electorate)
    run = found[0] if found is not None else None if backups is None else backups.run()
    own = {} if backups is None or run is None else {NAME: listing_of(backups, run)}
    return {**listings, **own}


def of_one_run(
    listings: Mapping[PeerId, Listing], electorate: Electorate
) -> tuple[Run, dict[PeerId, Sequence[StateEntry]]] | None:
    """Return the run that `runs_by_votes` puts first, and the entries of each peer that lists it; None if no peer lists a state of
    a valid run. Listings without a state do not count."""
    listings = {peer: listing for peer, listing in listings.items() if listing.entries}
    runs = runs_by_votes(listings, electorate)
    if not runs:
        return None
    of_it = {peer: listing.entries for peer, listing in listings.items() if listing.run_id == runs[0].id}
    return runs[0], of_it


def runs_by_votes(listings: Mapping[PeerId, Listing], electorate: Electorate) -> list[Run]:
    """Return the valid runs that voters list, the one with most votes first.

    A peer votes if it announces to be ready with a layer and lists a state of its own of it, or no state yet. If no peer does, all
    vote: the holders may be lost, and only keepers of backups left. Each owner has one vote, for the run that most of its peers
    list. Between runs with as many votes the one with more layers comes first, then the one whose voters were ready first.
    """
    listed = {peer: listing for peer, listing in listings.items() if _is_run(listing.run)}
    own = {
        peer: {entry.block for entry in listing.entries if not entry.backup and electorate.is_ready(peer, entry.block)}
        for peer, listing in listed.items()
    }
    holders = [peer for peer, listing in listed.items() if own[peer] or not listing.entries]
    voters = {peer: listed[peer].run for peer in holders if electorate.is_ready(peer, SHARED)} or {
        peer: listing.run for peer, listing in listed.items()
    }
    by_owner: dict[str, Counter[bytes]] = {}
    for peer, run in voters.items():
        by_owner.setdefault(electorate.owner(peer), Counter())[run] += 1
    votes = Counter(max(runs, key=lambda run: (runs[run], run)) for runs in by_owner.values())

    def rank(run: bytes) -> tuple[int, int, int, bytes]:
        of_it = [peer for peer in voters if voters[peer] == run]
        layers = set().union(*(own[peer] for peer in of_it))
        return votes[run], len(layers), -min(electorate.ready_after.get(peer, -1) for peer in of_it), run

    return [decode_run(run) for run in sorted(set(voters.values()), key=rank, reverse=True)]


def _is_run(encoded: bytes) -> bool:
    try:
        decode_run(encoded)
    except ProtocolError:
        return False
    return True


async def export(
    host: Host,
    out: Path,
    progress: Progress | None = None,
    *,
    force: bool = False,
    patience_s: float = PATIENCE_S,
    average: bool = True,
    on_unconfirmed: Callable[[Sequence[str]], None] = lambda _parts: None,
) -> int:
    """Write the trained model into the folder `out`, which appears once it is complete.

    A language model can be read with `from_pretrained`; any other model is written as safetensors for `load_state_dict`.

    Args:
        host: this node, a peer of the swarm.
        out: the new folder.
        progress: is called with the fetched and the total bytes.
        force: replaces a folder that holds nothing but a checkpoint.
        patience_s: how long to wait for peers that have all units together.
        average: writes the average of the weights (`ema`) in their place, if the run keeps one.
        on_unconfirmed: is called with the names of the parts whose state only one holder had, or another holder has
            differently.

    Returns:
        The step of the model.

    Raises:
        UsageError: if `out` is taken.
        PeerRefused: if the peers do not have all layers together in time.
        LocalError: if the disk is full.
    """
    check_free(out, force=force)
    board = state_board(host)
    try:
        newest = await _newest_whole_step(host, board, patience_s)
        root = host.config.home / "exports" / host.swarm.id.hex()[:16]
        store = StateStore(root, newest.run, newest_steps=1)
        unconfirmed: list[str] = []
        try:
            step = await fetch_states(
                board,
                lambda: _others(host),
                newest.blocks,
                into=store,
                at_least=newest.step,
                progress=progress,
                whole=True,
                electorate=lambda: Electorate.of(host.directory),
                on_unconfirmed=lambda blocks: unconfirmed.extend(all_named(blocks)),
            )
            # each chunk was checked on its way
            files = [store.path(step, block, verify=False) for block in newest.blocks]
            await _write(host, gather(files, average=average), out, force, unconfirmed)
            on_unconfirmed(unconfirmed)
            shutil.rmtree(store.folder, ignore_errors=True)
        finally:
            store.close()
    finally:
        await board.close()
    return step


def _others(host: Host) -> list[PeerId]:
    return [peer for peer in host.directory.peers() if peer != host.peer_id]


async def _newest_whole_step(host: Host, board: Switchboard, patience_s: float) -> WholeStep:
    """Find the newest whole step among the peers. Raises PeerRefused if there is none after `patience_s`."""
    assert host.swarm.manifest is not None
    units = tuple(range(host.swarm.manifest.model.units))
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while True:
        listings = await survey(board, _others(host))
        electorate = Electorate.of(host.directory)
        chosen = of_one_run(listings, electorate)
        if chosen is not None:  # a peer lists one run: keepers may have backups of the chosen one, too
            others = [peer for peer, listing in listings.items() if listing.run_id != chosen[0].id]
            listings |= await survey(board, others, run_id=chosen[0].id)
        found = whole_step(listings, len(units), electorate)
        if found is not None:
            return found
        if asyncio.get_running_loop().time() > deadline_s:
            lack = _lack(units, listings, electorate)
            raise PeerRefused(lack, code=ErrorCode.NOT_FOUND)
        await asyncio.sleep(AGAIN_S)


def _lack(units: Sequence[int], listings: Mapping[PeerId, Listing], electorate: Electorate) -> str:
    held = {entry.block for listing in listings.values() for entry in listing.entries}
    missing = [unit for unit in units if unit not in held]
    if not held:
        return (
            "no peer of the swarm has a training state: is it being trained, and has it reached its first checkpoint?"
        )
    if missing:
        return f"no peer has a training state of layers {missing}; try again when a peer with them is back"
    text = "the peers have no step of all layers together yet; try again after the next checkpoint of the training"
    run = of_one_run(listings, electorate)
    differ = None if run is None else Votes(run[1], electorate).disagreement(units)
    return text if differ is None else f"{text}: {differ}"


async def _write(host: Host, tensors: Mapping[str, Tensor], out: Path, force: bool, unconfirmed: Sequence[str]) -> None:
    assert host.swarm.manifest is not None
    language = host.swarm.manifest.kind == CAUSAL_LM
    weights = Weights(host)
    try:
        founded = await (weights.small_files() if language else weights.everything())
        await asyncio.to_thread(write_checkpoint, language, tensors, founded, out, force=force, unconfirmed=unconfirmed)
    finally:
        await weights.close()


def write_checkpoint(
    language: bool,
    tensors: Mapping[str, Tensor],
    founded: Path,
    out: Path,
    *,
    force: bool = False,
    unconfirmed: Sequence[str] = (),
) -> None:
    """Write trained tensors into the folder `out`; `founded` is the folder with the founder's files.

    A text file lists the `unconfirmed` parts, if any. Raises UsageError if `out` is taken, LocalError if the disk is full.
    """
    with new_folder(out, force=force) as folder:
        (write_language_model if language else write_module)(tensors, founded, folder)
        if unconfirmed:
            text = f"Only one machine had the state of these parts, or another has a different one: {', '.join(unconfirmed)}.\n"
            (folder / UNCONFIRMED_FILE).write_text(text)
