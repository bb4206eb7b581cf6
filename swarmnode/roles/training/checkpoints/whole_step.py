"""The newest step that the peers of a swarm have of the whole model, by what they list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.codec.body import SHARED
from swarmnode.codec.state_messages import StateEntry
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.roles.training.checkpoints.local_source import NAME
from swarmnode.roles.training.checkpoints.states import Listing, listing_of, survey
from swarmnode.roles.training.checkpoints.votes import Votes
from swarmnode.swarm.records.run import Run, decode_run
from swarmnode.swarm.storage.backups import BackupFolder


@dataclass(frozen=True)
class WholeStep:
    """A step of a run, and the blocks that the model has in it."""

    run: Run
    step: int
    blocks: tuple[int, ...]


def whole_step(listings: Mapping[PeerId, Listing], units: int) -> WholeStep | None:
    """The newest of the run that most peers are in; None where some unit lacks one that the others have."""
    found = of_one_run(listings)
    if found is None:
        return None
    run, of_it = found
    shares = any(entry.block == SHARED for entries in of_it.values() for entry in entries)
    blocks = (*((SHARED,) if shares else ()), *range(units))
    chosen = Votes(of_it).choose(blocks)
    return None if chosen is None else WholeStep(run, chosen.step, blocks)


async def find_whole_step(
    board: Switchboard,
    peers: Callable[[], Iterable[PeerId]],
    blocks: Collection[int],
    units: int,
    backups: BackupFolder | None,
) -> WholeStep | None:
    """The newest for who wants these blocks, which nobody alive may hold: the others are asked for the step of their backups."""
    listings = _with_own(await survey(board, peers(), tuple(blocks)), backups)
    found = of_one_run(listings)
    if found is None:
        return None
    run, of_it = found
    entries = [entry for listed in of_it.values() for entry in listed]
    steps = [{entry.step for entry in entries if entry.block == block} for block in blocks]
    newest = max(set.intersection(*steps), default=0)
    listings = await survey(board, peers(), at_least=newest, run_id=run.id)
    return whole_step(_with_own(listings, backups), units)


def _with_own(listings: dict[PeerId, Listing], backups: BackupFolder | None) -> dict[PeerId, Listing]:
    run = None if backups is None else backups.run()
    if backups is not None and run is not None:
        listings[NAME] = listing_of(backups, run)
    return listings


def of_one_run(listings: Mapping[PeerId, Listing]) -> tuple[Run, dict[PeerId, Sequence[StateEntry]]] | None:
    """The run of most peers, and what each of them has of it."""
    votes = Counter(listing.run for listing in listings.values() if listing.entries and _is_run(listing.run))
    if not votes:
        return None
    encoded = max(votes, key=lambda run: (votes[run], run))
    return decode_run(encoded), {peer: listing.entries for peer, listing in listings.items() if listing.run == encoded}


def _is_run(encoded: bytes) -> bool:
    try:
        decode_run(encoded)
    except ProtocolError:
        return False
    return True
