"""Beginnings: positions of a prompt that need no computing, because an earlier or a running text begins in the same
way.

A prompt continues the session of a finished text, whose caches the hops keep. Or it begins with the positions of a
session that is still in use: its hops copy them (`codec/messages.py`). If those positions are only being computed, the
prompt waits for them, as SGLang's scheduler lets queued prompts wait (arXiv 2312.07104): computed side by side, both
would take longer. So of many prompts that begin alike and come at once, one computes the beginning. If that one fails
or is given up, the next one takes its part. No prompt waits longer than a given time, and a waiting prompt holds
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.session_spec import SessionSpec

MOST_KEPT = 64  # sessions of one client
LEAST_POSITIONS = 16  # in common: with fewer, a new session costs no more
LEAST_SHARED = 256  # positions: fewer are computed in less time than a wait takes, and such sessions can be audited
BLOCK = 256


class SharedText:
    """Text of one owner whose positions the hops of a session hold, or will hold once they are `computed`.

    `retained` says that the text is finished: its session is idle until another text continues it. For other texts, `settled`
    is set as soon as the positions are computed, or never will be.
    """

    def __init__(self, owner: str, ids: Sequence[int], session: ClientSession, *, retained: bool = False) -> None:
        self.owner = owner
        self.ids = ids
        self.session = session
        self.truncations = session.truncations
        self.retained = self.computed = retained
        self.settled = asyncio.Event()

    def record_output(self) -> None:
        """Note that an output came: all of the positions have been computed, at every hop."""
        self.computed = True
        self.settled.set()


class Beginning(NamedTuple):
    """Start of a prompt: the first `length` positions come from a kept session to continue, or from `source` to copy.

    `goes_on` is the session to continue. `source` is the session to copy from, as after `truncations` truncations. Both
    are None if the prompt has to be computed from the start.
    """

    length: int = 0
    goes_on: ClientSession | None = None
    source: ClientSession | None = None
    truncations: int = 0


class _Alike(NamedTuple):
    """A text that has its first `length` positions in common with a prompt."""

    length: int
    text: SharedText

    @property
    def is_half(self) -> bool:
        return 2 * self.length >= len(self.text.ids)

    @property
    def worth(self) -> int:
        """Value in positions; less if the text is still being computed, which means waiting."""
        return self.length - (0 if self.text.computed else LEAST_SHARED)


class Beginnings:
    """Texts of one client whose caches are kept at peers, so that later prompts may begin with them. A text serves only its own
    owner.

    Otherwise the time to the first token would reveal what another owner has said.
    """

    def __init__(self) -> None:
        self._texts: list[SharedText] = []  # kept texts are in the order of their use, the latest last
        self._closed = False

    def __repr__(self) -> str:
        return f"<Beginnings: {len(self._retained)} texts kept, {len(self._texts) - len(self._retained)} prompts under way>"

    @property
    def _retained(self) -> list[SharedText]:
        return [text for text in self._texts if text.retained]

    async def find(self, owner: str, prompt: Sequence[int], spec: SessionSpec, patience_s: float) -> Beginning:
        """Find the longest useful beginning for `prompt`. Waits at most `patience_s` seconds for positions that are
        being computed.

        Returns an empty Beginning if there is none. Call `enter` before the next await then, so that other prompts can
        wait for this one.
        """
        loop = asyncio.get_running_loop()
        deadline_s, waits = loop.time() + patience_s, True
        while True:
            alike = self._alike(owner, prompt, spec)
            # A session is continued only by a prompt that shares half of it: otherwise the session's own text may still
            # continue it.
            fitting = [one for one in alike if one.text.retained and one.is_half and not spec.follows_grammar]
            whole = max(fitting, key=lambda one: one.length, default=None)
            able = [one for one in alike if one.text.computed or (waits and one.is_half)]
            shared = (one for one in able if one.length >= LEAST_SHARED)
            source = max(shared, key=lambda one: one.worth, default=None)
            if source is None or (0 if whole is None else whole.length) >= source.worth:
                return Beginning() if whole is None else self._go_on(whole)
            length, text = source
            if text.computed:
                return Beginning(length, source=text.session, truncations=text.truncations)
            try:
                await asyncio.wait_for(text.settled.wait(), deadline_s - loop.time())
            except asyncio.TimeoutError:
                waits = False

    def _alike(self, owner: str, prompt: Sequence[int], spec: SessionSpec) -> list[_Alike]:
        """Return the owner's texts that begin as `prompt` does and are computed with the codec and adapter of `spec`."""
        prompt = prompt[:-1]  # the logits of the last position are needed
        own = (one for one in self._texts if one.owner == owner and one.session.spec.is_computed_as(spec))
        common = (_Alike(_common_length(one.ids, prompt), one) for one in own)
        return [one for one in common if one.length >= LEAST_POSITIONS]

    def _go_on(self, whole: _Alike) -> Beginning:
        self._texts.remove(whole.text)
        return Beginning(whole.length, goes_on=whole.text.session)

    def enter(self, owner: str, prompt: Sequence[int], session: ClientSession) -> SharedText:
        """Register a prompt that `session` is about to compute, so that others can begin with it. Undo with `leave`."""
        text = SharedText(owner, prompt, session)
        self._texts.append(text)
        return text

    def leave(self, text: SharedText) -> None:
        """Forget a prompt whose session is over or about to end. Prompts that wait for it look for another text."""
        self._texts.remove(text)
        text.settled.set()

    async def retain(self, owner: str, session: ClientSession, ids: Sequence[int]) -> None:
        """Keep a session whose text is finished, for others that begin alike. If too many are kept, the least recently
        used is closed."""
        if self._closed:
            await session.close()
            return
        await session.retain()
        self._texts.append(SharedText(owner, ids, session, retained=True))
        if len(self._retained) > MOST_KEPT:
            await self._close_oldest()

    async def close(self) -> None:
        """Close all kept sessions, and keep no more."""
        self._closed = True
        while self._retained:
            await self._close_oldest()

    async def _close_oldest(self) -> None:
        text = self._retained[0]
        self._texts.remove(text)
        await text.session.close()


def _common_length(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of ids at the start that two texts have in common."""
    end = min(len(first), len(other))
    start = next((at for at in range(0, end, BLOCK) if first[at : at + BLOCK] != other[at : at + BLOCK]), end)
    return next((at for at in range(start, min(end, start + BLOCK)) if first[at] != other[at]), min(end, start + BLOCK))
