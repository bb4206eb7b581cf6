"""Exports a training: the newest step that the swarm's peers have together, written as a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from swarmnode.compute.training.gather import gather, write_language_model, write_module
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.roles.fetching.weights import Weights
from swarmnode.roles.host import Host
from swarmnode.roles.training.checkpoints.states import Listing, fetch_states, state_board, survey
from swarmnode.roles.training.checkpoints.votes import Votes
from swarmnode.roles.training.checkpoints.whole_step import WholeStep, of_one_run, whole_step
from swarmnode.swarm.records.manifest import CAUSAL_LM
from swarmnode.swarm.storage.content import Progress
from swarmnode.swarm.storage.new_folder import check_free, new_folder
from swarmnode.swarm.storage.states import StateStore

AGAIN_S = 1.0
PATIENCE_S = 30.0  # for peers to turn up who have all units


async def export(
    host: Host,
    out: Path,
    progress: Progress | None = None,
    *,
    force: bool = False,
    patience_s: float = PATIENCE_S,
) -> int:
    """Write the trained model into the folder `out`, which appears when all of it is there; the step that it is of.

    For a language model it is what `from_pretrained` reads, else safetensors for `load_state_dict`. Raises UsageError
    where there is something at `out` (`force`: something else than a checkpoint), PeerRefused where the peers do not have
    all units after `patience_s`, LocalError.
    """
    check_free(out, force=force)
    board = state_board(host.network, host.hello, host.link_config)
    try:
        found = await _look(host, board, patience_s)
        root = host.config.home / "exports" / host.swarm.id.hex()[:16]
        store = StateStore(root, found.run, keep=1)
        try:
            step = await fetch_states(
                board,
                lambda: _others(host),
                found.blocks,
                into=store,
                at_least=found.step,
                progress=progress,
                whole=True,
            )
            files = [
                store.path(step, block, verify=False) for block in found.blocks
            ]  # each chunk was checked on its way
            await _write(host, files, out, force)
            shutil.rmtree(store.folder, ignore_errors=True)
        finally:
            store.close()
    finally:
        await board.close()
    return step


def _others(host: Host) -> list[PeerId]:
    return [peer for peer in host.directory.peers() if peer != host.peer_id]


async def _look(host: Host, board: Switchboard, patience_s: float) -> WholeStep:
    """The newest step that the peers have of the model."""
    assert host.swarm.manifest is not None
    units = tuple(range(host.swarm.manifest.model.units))
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while True:
        listings = await survey(board, _others(host))
        found = whole_step(listings, len(units))
        if found is not None:
            return found
        if asyncio.get_running_loop().time() > deadline_s:
            raise PeerRefused(_lack(units, listings), code=ErrorCode.NOT_FOUND)
        await asyncio.sleep(AGAIN_S)


def _lack(units: Sequence[int], listings: Mapping[PeerId, Listing]) -> str:
    held = {entry.block for listing in listings.values() for entry in listing.entries}
    missing = [unit for unit in units if unit not in held]
    if not held:
        return (
            "no peer of the swarm has a training state: is it being trained, and has it reached its first checkpoint?"
        )
    if missing:
        return f"no peer has a training state of units {missing}; the model can be exported when one is there again"
    text = "the peers have no step of all units together yet; try again after the next checkpoint of the training"
    run = of_one_run(listings)
    differ = None if run is None else Votes(run[1]).disagreement(units)
    return text if differ is None else f"{text}: {differ}"


async def _write(host: Host, files: Sequence[Path], out: Path, force: bool) -> None:
    assert host.swarm.manifest is not None
    language = host.swarm.manifest.kind == CAUSAL_LM
    weights = Weights(host)
    try:
        founded = await (weights.small_files() if language else weights.everything())
        await asyncio.to_thread(write_checkpoint, language, gather(files), founded, out, force=force)
    finally:
        await weights.close()


def write_checkpoint(
    language: bool, tensors: Mapping[str, Tensor], founded: Path, out: Path, *, force: bool = False
) -> None:
    """Write trained tensors into `out`; `founded` has what the swarm was founded with. Raises UsageError, LocalError."""
    with new_folder(out, force=force) as folder:
        (write_language_model if language else write_module)(tensors, founded, folder)
