"""Session as an honest client would lead it, frame by frame, so that false frames arrive in the middle of a valid session.

No answers are read: the state of a session follows from the frames sent. The same seed gives the same frames.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from swarmnode.codec.audit_messages import SEED_BYTES, GetStatement
from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.messages import (
    LOOKUP,
    Attach,
    Branch,
    End,
    Input,
    KeepCache,
    Mode,
    Open,
    Truncate,
    Want,
    branch_proof,
)
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo

MAX_LENGTH = 16
MAX_EPOCHS = 4
SESSIONS = 4  # number of session ids that the strangers share
ID_BYTES = 8


class Step(NamedTuple):
    """Frame on a stream of the session protocol."""

    body: Body
    payload: bytes
    channel: int
    seq: int = 0


class Conversation:
    """Conversation of an honest client over one stream. `victim` holds all `units` of the model. `next` never ends."""

    def __init__(self, victim: str, units: int, session: bytes, chance: random.Random) -> None:
        self._route = (HopSpec(victim, 0, units),)
        self._session = session
        self._chance = chance
        self._mode = chance.choice((Mode.RING, Mode.DRIVEN))
        self._prompt = chance.choice((1, 2, 4))
        self._epoch = self._channel = self._held = self._cuts = 0
        self._steps = self._lead()

    def __repr__(self) -> str:
        return f"<Conversation in epoch {self._epoch}, {self._held} positions held>"

    def next(self) -> Step:
        """Return the next frame that an honest client would send."""
        return next(self._steps)

    def question(self) -> GetStatement:
        """Return the question that an auditor would ask about the session."""
        return GetStatement(self._session, bytes(SEED_BYTES), 0, max(1, self._held))

    def _lead(self) -> Iterator[Step]:
        while True:
            self._epoch += 1
            self._channel += 2
            yield Step(self._opened(), b"", self._channel - 1)
            yield Step(Attach(self._session, self._epoch, self._held + 1), b"", self._channel)
            while self._held < MAX_LENGTH and self._chance.random() < 0.85:
                yield self._fed()
                if self._held > self._prompt and self._chance.random() < 0.15:
                    yield self._cut()
            if self._chance.random() < 0.3:
                yield Step(KeepCache(), b"", self._channel - 1)
            if self._epoch == MAX_EPOCHS:
                yield Step(End(), b"", self._channel - 1)
                self._epoch = self._held = self._cuts = 0

    def _opened(self) -> Open:
        sampling = Sampling(prompt_length=self._prompt, max_new_tokens=4)
        known = min(self._held, MAX_LENGTH)
        return Open(
            self._session,
            self._epoch,
            self._route,
            0,
            self._mode,
            1,
            MAX_LENGTH,
            sampling=sampling,
            known=known,
            branch=self._branch() if self._mode == Mode.RING and self._chance.random() < 0.3 else None,
            drafts=self._chance.choice((0, 8)) if self._mode == Mode.RING else 0,
            proposer=LOOKUP,
        )

    def _branch(self) -> Branch:
        """Return a branch of one of the strangers' sessions, which may not exist, after no or one truncation."""
        source, length = bytes([self._chance.randrange(SESSIONS)]) * 16, self._chance.randint(1, self._prompt)
        return Branch(branch_proof(source, self._chance.choice((0, 0, 1)), self._session, length), length)

    def _fed(self) -> Step:
        """Return the input of the prompt, or of one more position after it."""
        count = self._prompt if self._held == 0 else 1
        ids, at = TensorInfo(Codec.NONE, DType.INT64, (1, count)), self._held
        self._held += count
        return Step(Input(ids, want=Want.LAST), bytes(ID_BYTES * count), self._channel - 1, at)

    def _cut(self) -> Step:
        self._cuts += 1
        self._held -= self._chance.choice((1, 2)) if self._held > 2 else 1
        return Step(Truncate(self._cuts, self._held), b"", self._channel - 1)
