"""Two accounts of one text: what the hops of a session said that they did, beside what replicas did with the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmnode.codec.messages import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.sketch import deviations
from swarmnode.plan.audits.judgement import Judgement, judge_states, judge_tokens
from swarmnode.plan.audits.tolerances import Calibration
from swarmnode.roles.serving.audits.hop_account import HopAccount
from swarmnode.roles.serving.audits.transcript import ids_digest

CodecAt = Callable[[int], Codec]
"""unit -> the coarsest codec that states have met when they enter it"""
SAME = 1e-4  # two sketches of the same bytes, on different machines


@dataclass(frozen=True)
class TextRun:
    """One way that a text went: the route, what each hop said of it, and the tokens that this route drew, by position.

    Where the route is not the session's first (`moved`), a hop may hold positions that others have sent it: those below its edge's
    base. Nobody of the route answers for them.
    """

    route: Sequence[HopSpec]
    accounts: Sequence[HopAccount]
    drawn: Mapping[int, int]
    moved: bool = False

    def base(self, index: int) -> int:
        """From which position on hop `index` has its input from the one before it."""
        return self.accounts[index].statement.received.base

    def contradiction(self, ids: Sequence[int]) -> int | None:
        """The first edge whose two ends say different things of what went over it: k is the edge into hop k, the one after the last
        hop is to us. None where there is none. Into hop 0 went `ids`, of which we were told those that are not in `drawn`."""
        taken = self.accounts[0].statement.received
        if taken.digest != ids_digest(torch.tensor(ids[: taken.length], dtype=torch.int64)):
            return 0
        apart = next((index for index in range(1, len(self.accounts)) if not self._agree(index)), None)
        return len(self.accounts) if apart is None and not self._was_told(ids) else apart

    def _was_told(self, ids: Sequence[int]) -> bool:
        """Whether the last hop signed for the tokens that it told us."""
        told = self.accounts[-1].statement.sent
        first, last = min(self.drawn, default=told.base), max(self.drawn, default=told.length - 1)
        if not told.base <= first <= last < told.length <= len(ids):
            return False
        tokens = [self.drawn.get(at, ids[at]) for at in range(told.base, told.length)]
        return told.digest == ids_digest(torch.tensor(tokens, dtype=torch.int64))

    def _agree(self, index: int) -> bool:
        sender, receiver, base = self.accounts[index - 1], self.accounts[index], self.base(index)
        if sender.sent_TK is None or receiver.received_TK is None or (base > 0 and not self.moved):
            return False
        if sender.statement.sent != receiver.statement.received:
            return False
        return max(deviations(sender.sent_TK[base:], receiver.received_TK[base:]), default=0.0) <= SAME


@dataclass(frozen=True)
class Comparison:
    """Hop by hop: `judgements` up to and with the first false one, behind which nothing can be said. `unclear` where the runs part
    at positions for which nobody of the routes answers."""

    judgements: Sequence[Judgement] = ()
    unclear: bool = False

    @property
    def false_hop(self) -> int | None:
        """The index of the hop at which the two runs part, having agreed before it."""
        return len(self.judgements) - 1 if self.judgements and self.judgements[-1].false else None

    def agree_at(self, index: int) -> bool | None:
        """Whether the runs agree up to and with this hop; None where they part before it, so that it cannot be told."""
        if self.false_hop == index:
            return False
        return True if len(self.judgements) > index else None


def compare(
    one: TextRun, other: TextRun, codec_at: CodecAt, calibration: Calibration, *, adapted: bool = False
) -> Comparison:
    """What came out of each hop in two runs of the same text, whose states had met no coarser codec than `codec_at` says: as the
    next hop got them, and in the end tokens. `adapted`: through an adapter."""
    judgements: list[Judgement] = []
    for index in range(len(one.route)):
        said = one.accounts[index].statement
        codec = codec_at(said.end)
        if index + 1 == len(one.route):
            tolerance = calibration.tolerance(said.number_format, codec, units=said.end)
            both = [at for at in one.drawn if at in other.drawn]
            drawn, again = ([run.drawn[at] for at in both] for run in (one, other))
            judgements.append(judge_tokens(drawn, again, tolerance))
            break
        mine_TK, yours_TK = one.accounts[index + 1].received_TK, other.accounts[index + 1].received_TK
        assert mine_TK is not None and yours_TK is not None, "only the first hop takes ids in"
        apart = deviations(mine_TK, yours_TK)
        tolerance = calibration.tolerance(said.number_format, codec, units=said.end, deviations=apart, adapted=adapted)
        judged = judge_states(apart, tolerance)
        if judged.false:
            judged = judge_states(apart[max(one.base(index + 1), other.base(index + 1)) :], tolerance)
            if not judged.false:  # it was sent by a hop that has left the route, and whatever follows is made of it
                return Comparison(tuple(judgements), unclear=True)
        elif not adapted:
            calibration.note(one.route[index].peer, said.number_format, codec, apart, units=said.end)
        judgements.append(judged)
        if judged.false:
            break
    return Comparison(tuple(judgements))
