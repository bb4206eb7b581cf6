"""A hop of a session reports faults of honest hops or of the request, so that clients leave them out or end the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, product
from typing import Any
from unittest.mock import patch

from attack import Outcome, main

from swarmnode.codec.messages import Error, Fault
from swarmnode.errors import ErrorCode, SwarmnodeError
from swarmnode.serving.session.session import StageSession
from tests.peer.toy_swarm import ToySwarm, expected

VIRTUAL, FAST = True, True
PROMPT, TOKENS = [5, 17, 3, 99, 42], 12
Spans = tuple[tuple[int, int], ...]
THREE: Spans = ((0, 1), (1, 3), (3, 4))
EVERY = 11  # of the cases; 1 tries all of them, in half a minute
CODES = (ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FINITE, ErrorCode.PEER_LOST, ErrorCode.DRAINING)
SIGNED, BARE, ENDING = "signed", "bare", "ending"


@contextmanager
def lying(liar: str, *, accused: int, code: ErrorCode, how: str, once: bool) -> Iterator[None]:
    """Have the hop `liar` report a fault of hop `accused` in each epoch, or once: with its signature, without one, or by ending its
    outputs with the code as an honest hop does."""
    done, lied = StageSession._done, set[int]()

    def lie(self: StageSession, *arguments: Any) -> None:
        done(self, *arguments)
        if (
            self.host.peer.network.peer_id != liar
            or self.epoch in lied
            or (once and lied)
            or self.computed < len(PROMPT) + 3
        ):
            return
        lied.add(self.epoch)
        if how == SIGNED:
            self._send_fault(accused, code)
        elif how == BARE:
            self._tell_client(Fault(self.epoch, accused, code, 3600.0))
        else:
            self._output_stream.close(Error(code))

    with patch.object(StageSession, "_done", lie):
        yield


def cases() -> Iterator[tuple[int, int, ErrorCode, str, bool, Spans]]:
    """Yield the place of the liar, the hop that it accuses, the code, how and whether once, and the layers of the spares."""
    for place, code, how, once in product(range(3), CODES, (SIGNED, BARE, ENDING), (True, False)):
        for accused in [at for at in (place - 1, place + 1) if 0 <= at < 3 and (how != ENDING or place == 2)]:
            yield place, accused, code, how, once, THREE
            yield place, accused, code, how, once, THREE[place : place + 1]
            if once and how != ENDING:  # else no route leads around the liar
                yield place, accused, code, how, once, THREE[accused : accused + 1]


async def attack() -> Outcome:
    said, tries = list[str](), 0
    for place, accused, code, how, once, spares in islice(cases(), 0, None, EVERY):
        tries += 1
        swarm = await ToySwarm.start(*THREE, *spares)
        liar, tokens, end = swarm.volunteers[place].peer, list[int](), ""
        with lying(liar, accused=accused, code=code, how=how, once=once):
            try:
                async for token in swarm.ring(PROMPT, TOKENS):
                    tokens.append(token)
            except SwarmnodeError as error:
                end = f"ended by {type(error).__name__}"
        honest = set(swarm.router.suspected) - {liar}
        if honest or tokens != expected(PROMPT, TOKENS):
            which = f"{'once' if once else 'always'}, {len(spares)} spares"
            said.append(f"{how} {code.name} of hop {accused} by hop {place} ({which}): {end}, {len(honest)} suspected")
    told = "; ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else "")
    return Outcome(
        not said, told or f"{tries} tries of one hop: no honest one suspected, and no session ended that can go on"
    )


main(__name__, attack, virtual=VIRTUAL)
