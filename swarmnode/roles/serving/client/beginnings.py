"""Beginnings: what of a prompt need not be computed, because an earlier one, or one that is computed just now, begins alike.

A prompt goes on with a session that is kept (`kept_sessions.py`), or begins as one that others still need: its hops copy the
positions (`codec/branch.py`). Where they are only being computed it waits for that, as prompts that are queued together do in
SGLang's scheduler (arXiv 2312.07104): computed beside one another both would take longer. So of many prompts that begin alike and
come at once one computes the beginning. Where that one fails or is given up the next of them takes its part; nobody waits longer
than a given time, and who waits holds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.roles.serving.client.client_session import ClientSession
from swarmnode.roles.serving.client.kept_sessions import KeptSession, KeptSessions, common_length
from swarmnode.roles.serving.client.session_spec import SessionSpec

LEAST_SHARED = 256  # positions: fewer are computed in less time than waiting costs, and then everybody may be audited


class PromptUnderWay:
    """A prompt whose session lasts. `settled` once its positions are computed, or will never be."""

    def __init__(self, owner: str, prompt: Sequence[int], session: ClientSession) -> None:
        self.owner = owner
        self.prompt = prompt
        self.session = session
        self.truncations = session.truncations
        self.computed = False
        self.settled = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PromptUnderWay of {len(self.prompt)} positions{', computed' * self.computed}>"

    def note_output(self) -> None:
        """An output came: all of its positions have been computed, at every hop."""
        self.computed = True
        self.settled.set()


class Beginning(NamedTuple):
    """With which session a prompt goes on, or as which it begins after so many `truncations`; and how many positions."""

    length: int = 0
    goes_on: ClientSession | None = None
    source: ClientSession | None = None
    truncations: int = 0


class _Source(NamedTuple):
    length: int
    session: ClientSession
    truncations: int
    under_way: PromptUnderWay | None  # where it is still to be waited for

    @property
    def worth(self) -> int:
        """In positions."""
        return self.length - (0 if self.under_way is None else LEAST_SHARED)


class Beginnings:
    """Of one client. What one owner has is never of use to another: how soon a text begins would tell what others have said."""

    def __init__(self) -> None:
        self._kept = KeptSessions()
        self._under_way: list[PromptUnderWay] = []

    def __repr__(self) -> str:
        return f"<Beginnings: {self._kept!r}, {len(self._under_way)} prompts under way>"

    async def find(self, owner: str, prompt: Sequence[int], spec: SessionSpec, patience_s: float) -> Beginning:
        """Where a prompt may begin; waits for at most `patience_s` seconds for what is being computed. Who goes on without one
        calls `enter` before anything else, so that others may wait for it."""
        loop = asyncio.get_running_loop()
        deadline_s, waits = loop.time() + patience_s, True
        while True:
            alike = self._kept.alike(owner, prompt, spec)
            # Of a session of which the prompt has a small part its own text may go on with it.
            fitting = [one for one in alike if 2 * one[0] >= len(one[1].ids) and not spec.follows_grammar]
            whole = max(fitting, key=_length, default=(0, None))
            source = self._source(owner, prompt, spec, alike, waits=waits)
            if source is None or whole[0] >= source.worth:
                return Beginning() if whole[1] is None else Beginning(whole[0], goes_on=self._kept.take(whole[1]))
            if source.under_way is None:
                return Beginning(source.length, source=source.session, truncations=source.truncations)
            try:
                await asyncio.wait_for(source.under_way.settled.wait(), deadline_s - loop.time())
            except asyncio.TimeoutError:
                waits = False

    def _source(
        self,
        owner: str,
        prompt: Sequence[int],
        spec: SessionSpec,
        kept: Sequence[tuple[int, KeptSession]],
        *,
        waits: bool,
    ) -> _Source | None:
        """The session as which it is best to begin. One whose prompt is being computed counts where half of it is common."""
        sources = [_Source(length, one.session, one.session.truncations, None) for length, one in kept]
        for one in self._under_way:
            length = common_length(one.prompt, prompt[:-1]) if one.owner == owner else 0
            is_alike = length >= LEAST_SHARED and one.session.spec.is_computed_as(spec)
            if is_alike and (one.computed or (waits and 2 * length >= len(one.prompt))):
                sources.append(_Source(length, one.session, one.truncations, None if one.computed else one))
        return max((one for one in sources if one.length >= LEAST_SHARED), key=lambda one: one.worth, default=None)

    def enter(self, owner: str, prompt: Sequence[int], session: ClientSession) -> PromptUnderWay:
        """This session is about to compute a prompt; until `leave` others may begin as it does."""
        under_way = PromptUnderWay(owner, prompt, session)
        self._under_way.append(under_way)
        return under_way

    def leave(self, under_way: PromptUnderWay) -> None:
        """Its session is over, or about to be. Whoever waits for it looks for another one."""
        self._under_way.remove(under_way)
        under_way.settled.set()

    async def keep(self, owner: str, session: ClientSession, ids: Sequence[int]) -> None:
        """A session whose text is whole, for others that begin alike."""
        await self._kept.keep(owner, session, ids)

    async def close(self) -> None:
        """End all sessions that are kept."""
        await self._kept.close()


def _length(alike: tuple[int, KeptSession]) -> int:
    return alike[0]
