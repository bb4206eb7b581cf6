"""Votes on states: they choose the step, and the version of each block, that more than one peer vouches for.

A peer is a holder of a block if it lists any own state of it. A step counts if more than half of each block's holders list
it (both, if there are two), and so does a version. A version with too few votes can be confirmed by holders whose own
versions hold nearly the same values, since devices round differently (`SecondVoice`). A backup of a step makes its keeper a
holder for this step only: whether it has backups of other steps says nothing.

If peers that announce a layer as ready list its state, only they vote, and on a step only those that were ready before it.
Each owner has one vote, however many peers it has. The state of a single voter is used, and called unconfirmed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.codec.body import SHARED
from swarmnode.codec.messages import StateEntry
from swarmnode.counting import layers, runs
from swarmnode.errors import CheckpointError, NetworkDown, PeerError
from swarmnode.net.addressing.addresses import Claimant, owner_of, wide_group
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import FileContent
from swarmnode.weights.sources import Source

Version = tuple[int, bytes]
"""Size and root of a block's state."""

SAMPLES = 4  # chunks
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # between devices: rounding errors of many updates
STRAYS = 1e-3  # share of the values that may differ by more


class SecondVoice:
    """Confirmation of a version by holders of other versions, by comparing their values: samples, or all of them if
    `whole`.

    `mute` has the names of the peers that did not send the states that they list.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.mute: set[str] = set()
        self._whole = whole
        self._compared: dict[tuple[str, FileContent, FileContent], bool] = {}
        self._rng = random.SystemRandom()

    async def confirmed(
        self, incoming: ChunkFolder, ours: FileContent, others: Iterable[tuple[Source, FileContent]], needed: int
    ) -> bool:
        """Return whether at least `needed` of the `others` (peers with their versions of the file) have values like those of
        `ours`. All chunks of `ours` must be in `incoming`."""
        for source, theirs in others:
            pair = (source.name, theirs, ours)
            if not needed:
                break
            if theirs.size == ours.size and pair not in self._compared:
                self._compared[pair] = await self._agrees(incoming, ours, source, theirs)
            needed -= self._compared.get(pair, False)
        return not needed

    async def _agrees(self, incoming: ChunkFolder, ours: FileContent, source: Source, theirs: FileContent) -> bool:
        chunks = ours.chunks()
        drawn = [(number, 1) for number in self._rng.sample(range(chunks), min(SAMPLES, chunks))]
        strays = 0.0 if self._whole else STRAYS
        try:
            for first, count in [(0, chunks)] if self._whole else drawn:
                async for number, chunk in source.chunks(theirs, first, count):
                    here = await asyncio.to_thread(incoming.read, ours, number)
                    if not are_alike(here, chunk, strays=strays):
                        return False
        except (PeerError, CheckpointError, NetworkDown):
            self.mute.add(source.name)
            return False
        return True


def are_alike(first: Buffer, other: Buffer, *, strays: float = STRAYS) -> bool:
    """Return whether two pieces of the same length hold nearly equal float32 numbers, except for a share `strays` of them."""
    if len(first) != len(other):
        return False
    count = len(first) // 4
    left_N, right_N = (np.frombuffer(piece, dtype="<f4", count=count) for piece in (first, other))
    same_N = np.frombuffer(first, dtype="<u4", count=count) == np.frombuffer(other, dtype="<u4", count=count)
    with np.errstate(all="ignore"):
        close_N = np.abs(left_N - right_N) <= ABSOLUTE + RELATIVE * np.abs(right_N)
    return bool(np.count_nonzero(~(same_N | close_N)) <= strays * count)


@dataclass(frozen=True)
class ChosenStep:
    """The step to fetch, and the version of each block. `lacking`: by block, how many more votes its version needs.
    `unconfirmed`: blocks with a single voter."""

    step: int
    versions: Mapping[int, Version]
    lacking: Mapping[int, int] = field(default_factory=dict)
    unconfirmed: Sequence[int] = field(default=(), compare=False)


def majority(holders: int) -> int:
    """Return the smallest number of holders that is more than half of them: both of two, two of three."""
    return holders // 2 + 1


@dataclass(frozen=True)
class Electorate:
    """The voters: for each peer its owner and the blocks that it is ready with, from its announcement, and the step
    `ready_after` which it became ready. A peer without an announcement is its own owner."""

    announced: Mapping[PeerId, Announcement] = field(default_factory=dict)
    ready_after: Mapping[PeerId, int] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Directory) -> Electorate:
        """Return the electorate of the peers that `directory` knows now."""
        return cls(directory.peers(), directory.ready_after())

    def owner(self, peer: PeerId) -> str:
        """Return the voter that `peer` belongs to: peers of one address group share a vote. An unknown peer votes for itself."""
        known = self.announced.get(peer)
        return peer if known is None else owner_of(Claimant(wide_group(known.addresses), peer))

    def is_ready(self, peer: PeerId, block: int) -> bool:
        """Return whether a peer announces that it is ready with a block; with the shared block if it holds any layer."""
        known = self.announced.get(peer)
        if known is None or known.life is not State.READY:
            return False
        return known.holds(block) if block != SHARED else known.span[0] < known.span[1]

    def was_ready(self, peer: PeerId, step: int) -> bool:
        """Return whether a peer that is ready came to the holders before this step: of an earlier one it has what it was given."""
        return self.ready_after.get(peer, -1) < step


class Votes:
    """Versions of training states that peers list, one for each peer, step and block of parameters; the versions compete by
    majority."""

    def __init__(self, listings: Mapping[PeerId, Sequence[StateEntry]], electorate: Electorate = Electorate()) -> None:
        self._electorate = electorate
        self._versions: dict[int, dict[int, dict[PeerId, Version]]] = {}  # by step, block, holder
        self._newest: dict[int, dict[PeerId, int]] = {}  # newest own state, by block and holder
        for peer, entries in listings.items():
            for entry in entries:
                version = (entry.size, entry.root)
                self._versions.setdefault(entry.step, {}).setdefault(entry.block, {}).setdefault(peer, version)
                if not entry.backup:
                    newest = self._newest.setdefault(entry.block, {})
                    newest[peer] = max(newest.get(peer, 0), entry.step)

    def choose(
        self,
        blocks: Collection[int],
        *,
        at_least: int = 0,
        step: int | None = None,
        begun: Collection[int] = (),
        failed: Collection[Version] = (),
    ) -> ChosenStep | None:
        """Choose the newest step that counts and its versions, without those in `failed`. A step whose fetch has begun
        comes first.

        `step` allows only this step, `at_least` none older. Returns None if no step counts.
        """
        able = [one for one in self._versions if one >= at_least and step in (None, one)]
        for one in sorted(able, key=lambda one: (one in begun, one), reverse=True):
            chosen = self._of_step(one, blocks, failed)
            if chosen is not None:
                return chosen
        return None

    def _of_step(self, step: int, blocks: Collection[int], failed: Collection[Version]) -> ChosenStep | None:
        versions: dict[int, Version] = {}
        lacking: dict[int, int] = {}
        unconfirmed: list[int] = []
        for block in blocks:
            listed = self._listed(step, block)
            holders = self._holders(step, block)
            needed = majority(holders)
            votes = Counter(version for version in listed.values() if version not in failed)
            if len(listed) < needed or not votes:
                return None
            if holders == 1:
                unconfirmed.append(block)
            versions[block] = max(votes, key=lambda version: (votes[version], version))
            if votes[versions[block]] < needed:
                lacking[block] = needed - votes[versions[block]]
        return ChosenStep(step, versions, lacking, tuple(unconfirmed))

    def _listed(self, step: int, block: int) -> dict[str, Version]:
        """Return, for each owner of peers, the version of a block's state at `step` that it votes for."""
        listed = self._versions[step].get(block, {})
        voters = self._having_a_say(step, block, listed)
        return {self._electorate.owner(peer): listed[peer] for peer in sorted(voters, reverse=True)}

    def _having_a_say(self, step: int, block: int, peers: Collection[PeerId]) -> Collection[PeerId]:
        """Return the peers among `peers` that may vote on the state of a block at `step`.

        These are the peers that were ready with the block before `step`; if there are none, those that are ready now. If no ready
        peer lists a state of its own for the block, all of `peers` may vote.
        """
        ready = [peer for peer in self._newest.get(block, {}) if self._electorate.is_ready(peer, block)]
        voters = [peer for peer in ready if self._electorate.was_ready(peer, step)] or ready
        return [peer for peer in peers if peer in voters] if voters else peers

    def _holders(self, step: int, block: int) -> int:
        """Return the number of owners that may vote on a block at a step."""
        holders = {*self._newest.get(block, {}), *self._versions[step].get(block, {})}
        return len({self._electorate.owner(peer) for peer in self._having_a_say(step, block, holders)})

    def dissenters(self, choice: ChosenStep) -> dict[PeerId, dict[int, Version]]:
        """Return the voters for another version of the chosen step, each with its versions of the blocks concerned."""
        found: dict[PeerId, dict[int, Version]] = {}
        for block in sorted(choice.versions):
            for peer, version in self.others(choice, block).items():
                found.setdefault(peer, {})[block] = version
        return found

    def disagreement(self, blocks: Collection[int]) -> str | None:
        """Describe the holders and versions of the newest step at which enough holders list a block but too few agree; None
        if there is none."""
        for step in sorted(self._versions, reverse=True):
            for block in blocks:
                listed, holders = self._listed(step, block), self._holders(step, block)
                if len(listed) >= majority(holders) and max(Counter(listed.values()).values()) < majority(holders):
                    return _sentence(step, block, listed, holders)
        return None

    def others(self, choice: ChosenStep, block: int) -> dict[PeerId, Version]:
        """Return the voters for another version of the block at the chosen step, one for each owner without a vote for the
        chosen version."""
        every, chosen, others = self._versions[choice.step].get(block, {}), choice.versions[block], {}
        owners = {owner for owner, version in self._listed(choice.step, block).items() if version == chosen}
        for peer in self._having_a_say(choice.step, block, every):
            owner = self._electorate.owner(peer)
            if every[peer] != chosen and owner not in owners:
                owners.add(owner)
                others[peer] = every[peer]
        return others

    def reached(self, blocks: Collection[int]) -> int:
        """Return the latest step that at least half of the owners that may vote on some block have reached; 0 if there is none."""
        latest = 0
        for block in blocks:
            newest = self._newest.get(block, {})
            voters = [peer for peer in newest if self._electorate.is_ready(peer, block)] or newest
            by_owner: dict[str, int] = {}
            for peer in voters:
                owner = self._electorate.owner(peer)
                by_owner[owner] = max(by_owner.get(owner, 0), newest[peer])
            steps = sorted(by_owner.values(), reverse=True)
            latest = max(latest, steps[(len(steps) - 1) // 2]) if steps else latest
        return latest


def _sentence(step: int, block: int, listed: Mapping[PeerId, Version], holders: int) -> str:
    camps: dict[Version, list[PeerId]] = {}
    for peer in sorted(listed):
        camps.setdefault(listed[peer], []).append(peer)
    ordered = sorted(camps.items(), key=lambda camp: (-len(camp[1]), camp))
    told = "; ".join(f"{', '.join(peers)}: {root.hex()[:8]}" for (_, root), peers in ordered)
    return (
        f"of {named(block)} at step {step} its {holders} holders have different states, and {majority(holders)} would have to "
        f"have the same one ({told})"
    )


def named(block: int) -> str:
    """Return the name of a block of parameters in texts for users: its layer, or the weights that two layers share."""
    return "the weights that the first and the last layer share" if block == SHARED else f"layer {block}"


def all_named(blocks: Iterable[int]) -> list[str]:
    """Return the names of blocks in texts for users, with layers that follow one another as one range; empty for no blocks."""
    known = set(blocks)
    return [*(layers(run.start, run.stop) for run in runs(known - {SHARED})), *map(named, known & {SHARED})]
