"""Votes on states: of what peers say that they have, what one of them alone cannot have made up.

A peer is a holder of a block where it lists any state of it that is its own. A step counts where more than half of each block's
holders list it (both, where there are two), and so does a version; what a version lacks in votes may be made up for by holders
whose own versions are alike, for devices round differently (`second_voice.py`). A backup of a step makes its keeper a holder as
far as this step goes: that it has others, or not this one, says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.codec.body import SHARED
from swarmnode.codec.state_messages import StateEntry
from swarmnode.net.interfaces import PeerId

Version = tuple[int, bytes]
"""Size and root of a block's state."""


@dataclass(frozen=True)
class ChosenStep:
    """The step to fetch, and which version of each block. `lacking`: by block, how many votes more its version needs."""

    step: int
    versions: Mapping[int, Version]
    lacking: Mapping[int, int] = field(default_factory=dict)


def majority(holders: int) -> int:
    """So many of them are more than any minority: both of two, two of three."""
    return holders // 2 + 1


class Votes:
    """What each peer lists, once for each step and block."""

    def __init__(self, listings: Mapping[PeerId, Sequence[StateEntry]]) -> None:
        self._versions: dict[int, dict[int, dict[PeerId, Version]]] = {}  # by step, block, holder
        self._newest: dict[int, dict[PeerId, int]] = {}  # by block and holder, backups apart
        for peer, entries in listings.items():
            for entry in entries:
                version = (entry.size, entry.root)
                self._versions.setdefault(entry.step, {}).setdefault(entry.block, {}).setdefault(peer, version)
                if not entry.backup:
                    newest = self._newest.setdefault(entry.block, {})
                    newest[peer] = max(newest.get(peer, 0), entry.step)

    def __repr__(self) -> str:
        return f"<Votes on {len(self._versions)} steps of {len(self._newest)} blocks>"

    def choose(
        self,
        blocks: Collection[int],
        *,
        at_least: int = 0,
        step: int | None = None,
        begun: Collection[int] = (),
        failed: Collection[Version] = (),
    ) -> ChosenStep | None:
        """The newest step that counts, unless a fetch of another one was begun, without versions that `failed`; None where there is
        none. `step`: this one or none."""
        able = [one for one in self._versions if one >= at_least and step in (None, one)]
        for one in sorted(able, key=lambda one: (one in begun, one), reverse=True):
            chosen = self._of_step(one, blocks, failed)
            if chosen is not None:
                return chosen
        return None

    def _of_step(self, step: int, blocks: Collection[int], failed: Collection[Version]) -> ChosenStep | None:
        versions: dict[int, Version] = {}
        lacking: dict[int, int] = {}
        for block in blocks:
            listed = self._versions[step].get(block, {})
            needed = majority(self._holders(step, block))
            votes = Counter(version for version in listed.values() if version not in failed)
            if len(listed) < needed or not votes:
                return None
            versions[block] = max(votes, key=lambda version: (votes[version], version))
            if votes[versions[block]] < needed:
                lacking[block] = needed - votes[versions[block]]
        return ChosenStep(step, versions, lacking)

    def _holders(self, step: int, block: int) -> int:
        """How many have a say in a step."""
        return len({*self._newest.get(block, {}), *self._versions[step].get(block, {})})

    def dissenters(self, choice: ChosenStep) -> dict[PeerId, list[int]]:
        """Who has another version of the chosen step, and of which blocks."""
        found: dict[PeerId, list[int]] = {}
        for block in sorted(choice.versions):
            for peer in self.others(choice, block):
                found.setdefault(peer, []).append(block)
        return found

    def disagreement(self, blocks: Collection[int]) -> str | None:
        """In a sentence, who has which version of the newest step that as many hold as must agree, where too few do; None where
        nobody differs."""
        for step in sorted(self._versions, reverse=True):
            for block in blocks:
                listed, holders = self._versions[step].get(block, {}), self._holders(step, block)
                if len(listed) >= majority(holders) and max(Counter(listed.values()).values()) < majority(holders):
                    return _sentence(step, block, listed, holders)
        return None

    def others(self, choice: ChosenStep, block: int) -> dict[PeerId, Version]:
        """The holders of another version of the chosen step."""
        listed = self._versions[choice.step].get(block, {})
        return {peer: version for peer, version in listed.items() if version != choice.versions[block]}

    def reached(self, blocks: Collection[int]) -> int:
        """The latest step that some block's holders are at, by the word of more than any minority of them."""
        steps = [sorted(self._newest[block].values(), reverse=True) for block in blocks if block in self._newest]
        return max((newest[(len(newest) - 1) // 2] for newest in steps), default=0)


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
    """A block, to a user."""
    return "what the first and the last unit share" if block == SHARED else f"unit {block}"
