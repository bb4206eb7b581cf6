"""Kept sessions: whose text is whole, and whose caches the hops keep for another text that begins as it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.roles.serving.client.client_session import ClientSession
from swarmnode.roles.serving.client.session_spec import SessionSpec

MOST = 64  # of one client
LEAST_POSITIONS = 16  # in common: below, a new session costs no more
BLOCK = 256


class KeptSession(NamedTuple):
    """`ids` are those whose positions the hops have."""

    owner: str
    session: ClientSession
    ids: Sequence[int]


class KeptSessions:
    """Those of one owner are never gone on with for another: how soon a text begins would tell what others have said."""

    def __init__(self) -> None:
        self._kept: list[KeptSession] = []  # the one that was used last at the end
        self._closed = False

    def __repr__(self) -> str:
        return f"<KeptSessions, {len(self._kept)} of them>"

    def __len__(self) -> int:
        return len(self._kept)

    def alike(self, owner: str, prompt: Sequence[int], spec: SessionSpec) -> list[tuple[int, KeptSession]]:
        """The owner's sessions that are computed as `spec` is and begin as a prompt does, each with how many positions."""
        prompt = prompt[:-1]  # the last one's logits are needed
        begin = list(prompt[:LEAST_POSITIONS])
        common = [
            (common_length(kept.ids, prompt), kept)
            for kept in self._kept
            if kept.owner == owner
            and list(kept.ids[:LEAST_POSITIONS]) == begin
            and kept.session.spec.is_computed_as(spec)
        ]
        return [(length, kept) for length, kept in common if length >= LEAST_POSITIONS]

    def take(self, kept: KeptSession) -> ClientSession:
        """It is not kept any more."""
        self._kept.remove(kept)
        return kept.session

    async def keep(self, owner: str, session: ClientSession, ids: Sequence[int]) -> None:
        """A session whose last output has come. Of too many, the one that was used the longest ago is closed."""
        if self._closed:
            await session.close()
            return
        await session.keep()
        self._kept.append(KeptSession(owner, session, ids))
        if len(self._kept) > MOST:
            await self._kept.pop(0).session.close()

    async def close(self) -> None:
        """All of them."""
        self._closed = True
        while self._kept:
            await self._kept.pop().session.close()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts begin with alike."""
    end = min(len(one), len(other))
    start = next((at for at in range(0, end, BLOCK) if one[at : at + BLOCK] != other[at : at + BLOCK]), end)
    return next((at for at in range(start, min(end, start + BLOCK)) if one[at] != other[at]), min(end, start + BLOCK))
