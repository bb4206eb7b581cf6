"""Two accounts of one text: what the hops of a session said that they did, beside what replicas did with the same text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnode.codec.messages import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.sketch import deviations
from swarmnode.plan.audits.judgement import Judgement, judge_states, judge_tokens
from swarmnode.plan.audits.tolerances import Calibration
from swarmnode.roles.serving.audit_server import HopAccount
from swarmnode.roles.serving.transcript import id_bytes
from swarmnode.swarm.records.statement import Edge

SAME = 1e-4  # two sketches of the same bytes, on different machines


@dataclass(frozen=True)
class TextRun:
    """One way that a text went: the route, what each hop said of it, and the tokens that were drawn at the judged positions."""

    route: Sequence[HopSpec]
    accounts: Sequence[HopAccount]
    drawn: Sequence[int]

    def contradiction(self, ids: Sequence[int]) -> int | None:
        """The first edge whose two ends say different things of what went over it: k is the edge into hop k. None where there is
        none. Into hop 0 went `ids`."""
        taken = self.accounts[0].statement.received
        fed_T = torch.tensor(ids[: taken.length], dtype=torch.int64)
        if taken.digest != hashlib.sha256(id_bytes(fed_T)).digest():
            return 0
        for index in range(1, len(self.accounts)):
            if not _agree(self.accounts[index - 1], self.accounts[index]):
                return index
        return None


@dataclass(frozen=True)
class Comparison:
    """Hop by hop: `judgements` up to and with the first false one, behind which nothing can be said."""

    judgements: Sequence[Judgement] = field(default_factory=tuple)

    @property
    def false_hop(self) -> int | None:
        """The index of the hop at which the two runs part, having agreed before it."""
        return len(self.judgements) - 1 if self.judgements and self.judgements[-1].false else None


def compare(one: TextRun, other: TextRun, calibration: Calibration) -> Comparison:
    """What came out of each hop in two runs of the same text: states as the next hop got them, and in the end tokens."""
    judgements: list[Judgement] = []
    for index in range(len(one.route)):
        said = one.accounts[index].statement
        tolerance = calibration.tolerance(said.number_format, Codec(said.codec), units=said.end)
        if index + 1 == len(one.route):
            judgements.append(judge_tokens(one.drawn, other.drawn, tolerance))
        else:
            mine, yours = one.accounts[index + 1].received_TK, other.accounts[index + 1].received_TK
            assert mine is not None and yours is not None, "only the first hop takes ids in"
            apart = deviations(mine, yours)
            judgements.append(judge_states(apart, tolerance))
            if not judgements[-1].false:
                calibration.note(one.route[index].peer, said.number_format, Codec(said.codec), apart, units=said.end)
        if judgements[-1].false:
            break
    return Comparison(tuple(judgements))


def _agree(sender: HopAccount, receiver: HopAccount) -> bool:
    sent, received = sender.statement.sent, receiver.statement.received
    if sender.sent_TK is None or receiver.received_TK is None or not _same_digest(sent, received):
        return False
    return max(deviations(sender.sent_TK, receiver.received_TK)) <= SAME


def _same_digest(sent: Edge, received: Edge) -> bool:
    return (sent.digest, sent.base, sent.length) == (received.digest, received.base, received.length)
