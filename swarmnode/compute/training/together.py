"""Replicas that agree within one process: what reducers do over links, told without them. For tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.compress.codecs import Buffer
from swarmnode.compute.training.exchange import Exchange
from swarmnode.compute.training.parts import cut
from swarmnode.compute.training.round import Round


def agree(
    exchanges: Sequence[Exchange], locals_N: Sequence[Tensor], weights: Sequence[float]
) -> tuple[list[Tensor], int]:
    """Run one attempt of the members' exchanges; what each of them ends with, and the bytes that crossed between them.

    A member of weight 0 only listens.
    """
    runs = [
        exchange.run(local_N, weight) for exchange, local_N, weight in zip(exchanges, locals_N, weights, strict=True)
    ]
    rounds = [next(run) for run in runs]
    crossed_bytes = 0
    while True:
        sums, round_bytes = _sum(rounds)
        crossed_bytes += round_bytes
        rounds, results = [], []
        for run, total_N in zip(runs, sums, strict=True):
            try:
                rounds.append(run.send(total_N))
            except StopIteration as ended:
                results.append(ended.value)
        if results:
            return results, crossed_bytes


def _sum(rounds: Sequence[Round]) -> tuple[list[Tensor], int]:
    contributors = [round_ for round_ in rounds if round_.weight]
    pieces: list[list[Tensor]] = [[round_.vector_N[:0]] for round_ in rounds]
    crossed_bytes = 0
    for number, part in cut(len(rounds[0].vector_N), len(contributors)):
        owner = contributors[number]
        offers = [(round_.weight, *round_.offer(part)) for round_ in contributors]
        agreed = owner.settle(part, offers)
        crossed_bytes += sum(
            _length(offer[2]) for offer, sender in zip(offers, contributors, strict=True) if sender is not owner
        )
        crossed_bytes += _length(agreed[1]) * (len(rounds) - 1)
        for own, round_ in zip(pieces, rounds, strict=True):
            own.append(round_.read(part, *agreed))
    return [torch.cat(own) for own in pieces], crossed_bytes


def _length(payload: Buffer) -> int:
    return memoryview(payload).nbytes
