"""Beginnings: what of a prompt need not be computed, because an earlier one, or one that is computed just now, begins alike.

A prompt goes on with the session of a text that is whole, whose caches the hops keep, or begins as one that others still need: its
hops copy the positions (`codec/messages.py`). Where they are only being computed it waits for that, as prompts that are queued
together do in SGLang's scheduler (arXiv 2312.07104): computed beside one another both would take longer. So of many prompts that
begin alike and come at once one computes the beginning. Where that one fails or is given up the next of them takes its part; nobody
waits longer than a given time, and who waits holds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.session_spec import SessionSpec

MOST_KEPT = 64  # sessions of one client
LEAST_POSITIONS = 16  # in common: below, a new session costs no more
LEAST_SHARED = 256  # positions: fewer are computed in less time than waiting costs, and then everybody may be audited
BLOCK = 256


class SharedText:
    """The ids of one owner whose positions the hops of a session have, or will have once they are `computed`.

    `kept` once the text is whole: its session serves nobody until another text goes on with it. `settled` as soon as the positions
    are computed, or will never be.
    """

    def __init__(self, owner: str, ids: Sequence[int], session: ClientSession, *, kept: bool = False) -> None:
        self.owner = owner
        self.ids = ids
        self.session = session
        self.truncations = session.truncations
        self.kept = self.computed = kept
        self.settled = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SharedText of {len(self.ids)} positions{', computed' * self.computed}{', kept' * self.kept}>"

    def note_output(self) -> None:
        """Note that an output came: all of the positions have been computed, at every hop."""
        self.computed = True
        self.settled.set()


class Beginning(NamedTuple):
    """With which session a prompt goes on, or as which it begins after so many `truncations`; and how many positions."""

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
        """In positions: what is still to be waited for is worth less."""
        return self.length - (0 if self.text.computed else LEAST_SHARED)


class Beginnings:
    """Of one client. What one owner has is never of use to another: how soon a text begins would tell what others have said."""

    def __init__(self) -> None:
        self._texts: list[SharedText] = []  # of those that are kept the one that was used last at the end
        self._closed = False

    def __repr__(self) -> str:
        return f"<Beginnings: {len(self._kept)} texts kept, {len(self._texts) - len(self._kept)} prompts under way>"

    @property
    def _kept(self) -> list[SharedText]:
        return [text for text in self._texts if text.kept]

    async def find(self, owner: str, prompt: Sequence[int], spec: SessionSpec, patience_s: float) -> Beginning:
        """Find where a prompt may begin; wait at most `patience_s` seconds for what is being computed. Who goes on without one
        calls `enter` before anything else, so that others may wait for it."""
        loop = asyncio.get_running_loop()
        deadline_s, waits = loop.time() + patience_s, True
        while True:
            alike = self._alike(owner, prompt, spec)
            # Of a session of which the prompt has a small part its own text may go on with it.
            fitting = [one for one in alike if one.text.kept and one.is_half and not spec.follows_grammar]
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
        """The owner's texts that are computed as `spec` is and begin as a prompt does."""
        prompt = prompt[:-1]  # the last one's logits are needed
        own = (one for one in self._texts if one.owner == owner and one.session.spec.is_computed_as(spec))
        common = (_Alike(_common_length(one.ids, prompt), one) for one in own)
        return [one for one in common if one.length >= LEAST_POSITIONS]

    def _go_on(self, whole: _Alike) -> Beginning:
        self._texts.remove(whole.text)
        return Beginning(whole.length, goes_on=whole.text.session)

    def enter(self, owner: str, prompt: Sequence[int], session: ClientSession) -> SharedText:
        """Let others begin as a session does that is about to compute a prompt, until `leave`."""
        text = SharedText(owner, prompt, session)
        self._texts.append(text)
        return text

    def leave(self, text: SharedText) -> None:
        """Forget a prompt whose session is over, or about to be. Whoever waits for it looks for another one."""
        self._texts.remove(text)
        text.settled.set()

    async def keep(self, owner: str, session: ClientSession, ids: Sequence[int]) -> None:
        """Keep a session whose text is whole, for others that begin alike. Of too many, the one that was used the longest ago is
        closed."""
        if self._closed:
            await session.close()
            return
        await session.keep()
        self._texts.append(SharedText(owner, ids, session, kept=True))
        if len(self._kept) > MOST_KEPT:
            await self._close_oldest()

    async def close(self) -> None:
        """End all sessions that are kept, and keep no more."""
        self._closed = True
        while self._kept:
            await self._close_oldest()

    async def _close_oldest(self) -> None:
        text = self._kept[0]
        self._texts.remove(text)
        await text.session.close()


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts begin with alike."""
    end = min(len(one), len(other))
    start = next((at for at in range(0, end, BLOCK) if one[at : at + BLOCK] != other[at : at + BLOCK]), end)
    return next((at for at in range(start, min(end, start + BLOCK)) if one[at] != other[at]), min(end, start + BLOCK))
