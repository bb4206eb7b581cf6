"""Guesses of several sessions by the model's own prediction layer (MTP) or an EAGLE head, at the last hop.

Behind each pass the layer reads the hidden states of the positions whose tokens were just drawn, and these tokens. It has KV caches
of its own. They begin with the answer, as the last hop does not know the tokens of the prompt. A session whose guesses are seldom
right, or whose first hop sends no guesses, rests and tries again later.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.executor import forget_traceback, is_device_fault
from swarmnode.compute.model.mtp import GuessingLayer
from swarmnode.compute.serving.cache import OutOfCache
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Throttle
from swarmnode.ledger import MemoryLedger

log = logging.getLogger(__name__)

GUESSES = 2  # behind a drawn token: the layer was trained for one, and is right less often about each further one
CACHE_POSITIONS = 16_384  # of all sessions together; each claims the double, as a layer is copied when sessions regroup
CONTEXT = 512  # positions that a session's cache holds at most; a longer answer begins anew with an empty one
KEPT = 1 / 16  # weight of a new verdict
LEAST_RIGHT = 0.2  # share of right guesses below which a session rests
PATIENCE = 16  # passes without any guess from the first hop before a session rests
RETRY = 64  # passes between tries of a resting session


@dataclass(frozen=True)
class DrawnStates:
    """Positions of one session with their drawn tokens.

    Args:
        session: Key of the session.
        start: First position.
        hidden_TH: States that left the model's last layer at T positions.
        ids: Token drawn behind each.
        guessed: Whether the first hop has sent guesses with these positions.
    """

    session: Hashable
    start: int
    hidden_TH: Tensor
    ids: tuple[int, ...]
    guessed: bool

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + len(self.ids)


@dataclass
class _Session:
    """A session's cache, which holds positions [begin, end), and the outcome of its guesses."""

    begin: int = 0
    end: int = -1
    guess: tuple[int, int] | None = None  # position and id of the latest first guess
    right: float = 1.0  # share of right guesses, of late
    ignored: int = 0  # passes since the first hop last sent a guess
    passes: int = 0

    def judge(self, drawn: DrawnStates) -> None:
        """Compare the latest guess with the tokens drawn since."""
        self.passes += 1
        self.ignored = 0 if drawn.guessed else self.ignored + 1
        if self.guess is None:
            return
        (position, token), self.guess = self.guess, None
        place = position - drawn.start - 1
        if 0 <= place < len(drawn.ids):
            self.right += KEPT * ((drawn.ids[place] == token) - self.right)

    @property
    def rests(self) -> bool:
        """Whether the session guesses nothing behind this pass."""
        return (self.ignored > PATIENCE or self.right < LEAST_RIGHT) and self.passes % RETRY > 1


class MtpGuesses:
    """Guesses by a layer beside the model's head. Used from the compute thread only."""

    def __init__(
        self, layer: GuessingLayer, throttle: Throttle, ledger: MemoryLedger | None, *, capture: bool, kv: str
    ):
        self.layer = layer
        cache_bytes = CACHE_POSITIONS * layer.block.kv_bytes_per_token(kv)
        self._runner = StageRunner(layer.block, RunnerConfig(cache_bytes, capture=capture, kv=kv), throttle, ledger)
        self._sessions: dict[Hashable, _Session] = {}
        self.fault = ""  # why nothing is guessed any more

    @torch.inference_mode()
    def guess(self, drawn: Sequence[DrawnStates]) -> dict[Hashable, tuple[int, ...]]:
        """Return at most GUESSES tokens that may follow the last drawn one, by session; sessions that rest are left out.

        An error of the layer ends all guessing, and is logged. Raises faults of the device.
        """
        try:
            ready = [one for one in drawn if not self.fault and self._prepare(one)]
            return self._guess(ready) if ready else {}
        except Exception as error:
            if is_device_fault(error):
                raise
            self.fault = f"{type(error).__name__}: {error}"
            log.error("the prediction layer guesses no more\n%s", forget_traceback(error))
            return {}

    def close(self, session: Hashable) -> None:
        """Free a session; no error if it is unknown."""
        if self._sessions.pop(session, None) is not None:
            self._runner.close(session)

    def close_all(self) -> None:
        """Free all sessions. The weights of the layer belong to its span."""
        self._sessions.clear()
        self._runner.close_all(keep_span=True)

    def _prepare(self, drawn: DrawnStates) -> bool:
        """Judge the session's latest guess, and make room in its cache. Returns whether the session shall guess."""
        session_state = self._sessions.setdefault(drawn.session, _Session())
        session_state.judge(drawn)
        if session_state.rests:
            return False
        goes_on = (
            session_state.begin <= drawn.start <= session_state.end
            and drawn.end + GUESSES <= session_state.begin + CONTEXT
        )
        if not goes_on:
            self._runner.close(drawn.session)
            session_state.end = -1
            try:
                self._runner.open(drawn.session, rows=1, max_length=max(CONTEXT, len(drawn.ids) + GUESSES))
            except OutOfCache:
                return False
            session_state.begin = drawn.start
        session_state.end = drawn.end
        return True

    def _guess(self, drawn: Sequence[DrawnStates]) -> dict[Hashable, tuple[int, ...]]:
        starts = {one.session: one.start - self._sessions[one.session].begin for one in drawn}
        states = {one.session: self.layer.own_states(one.hidden_TH[None]) for one in drawn}
        ids = {one.session: torch.tensor([one.ids]) for one in drawn}
        guesses: dict[Hashable, tuple[int, ...]] = dict.fromkeys(starts, ())
        for _ in range(GUESSES):
            last_RH = self._run(starts, states, ids)
            tokens = self.layer.guess(last_RH).tolist()
            for row, (session, token) in enumerate(zip(starts, tokens, strict=True)):
                starts[session] += ids[session].shape[1]
                states[session], ids[session] = last_RH[None, row : row + 1], torch.tensor([[token]])
                guesses[session] += (token,)
        for one in drawn:
            self._sessions[one.session].guess = (one.end + 1, guesses[one.session][0])
        return guesses

    def _run(
        self, starts: Mapping[Hashable, int], states: Mapping[Hashable, Tensor], ids: Mapping[Hashable, Tensor]
    ) -> Tensor:
        """Pass positions through the layer. Returns hidden_RH as they leave it at the last position of each session."""
        works = [
            StepInput(session, self.layer.enter(states[session], ids[session]), start=start, truncate_to=start)
            for session, start in starts.items()
        ]
        return torch.cat([result.output[:, -1] for result in self._runner.run(works)])
