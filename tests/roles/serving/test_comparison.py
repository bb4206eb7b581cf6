"""What neighbours of a route and replicas say, side by side."""

from __future__ import annotations

import hashlib

import torch

from swarmnode.codec.messages import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.compute.serving.sketch import sketch
from swarmnode.plan.audits.tolerances import Calibration
from swarmnode.roles.serving.audit_server import HopAccount
from swarmnode.roles.serving.comparison import TextRun, compare
from swarmnode.roles.serving.transcript import id_bytes
from swarmnode.swarm.records.statement import Edge, Statement

SEED = bytes(16)
IDS = list(range(64))
FED = Edge(hashlib.sha256(id_bytes(torch.tensor(IDS))).digest(), 0, 64)


def states(layer: int, noise: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(64, 96, generator=generator) + noise * torch.randn(64, 96, generator=generator)


def run(first: torch.Tensor, second: torch.Tensor, drawn: list[int], name: str = "") -> TextRun:
    """Three hops; `first` and `second` are what went over the edges between them."""
    edges = [FED, *(Edge(hashlib.sha256(sent.numpy()).digest(), 0, 64) for sent in (first, second)), Edge()]
    sketches = [None, sketch(first, SEED), sketch(second, SEED), None]
    route = [HopSpec(f"{name}{unit}", unit, unit + 2) for unit in (0, 2, 4)]
    accounts = [
        HopAccount(
            Statement(
                *(bytes(32), hop.peer, bytes(16), hop.start, hop.end, "float32", Codec.NONE, SEED, 0, 64),
                *(edges[index], edges[index + 1], bytes(32)),
            ),
            b"",
            sketches[index],
            sketches[index + 1],
        )
        for index, hop in enumerate(route)
    ]
    return TextRun(route, accounts, drawn)


HONEST = run(states(1), states(2), IDS)


def false_hop(other: TextRun) -> int | None:
    assert other.contradiction(IDS) is None
    return compare(HONEST, other, Calibration()).false_hop


def test_the_first_hop_that_differs_is_named_and_nothing_is_said_behind_it() -> None:
    assert false_hop(run(states(1, 1e-7), states(2, 1e-7), IDS)) is None
    assert false_hop(run(states(1, 1e-3), states(2, 1e-3), IDS)) == 0
    assert false_hop(run(states(1), states(3), [9] * 64)) == 1
    assert false_hop(run(states(1), states(2), [9] * 64)) == 2


def test_who_states_something_else_than_it_sent_contradicts_its_neighbour() -> None:
    honest, lied = run(states(1), states(2), IDS), run(states(1, 1e-2), states(2), IDS)
    keeps_its_digest = HopAccount(
        honest.accounts[0].statement, b"", None, lied.accounts[0].sent_TK
    )  # of what was sent, beside a sketch of what was not
    changes_both = lied.accounts[0]
    for account in (keeps_its_digest, changes_both):
        assert TextRun(honest.route, [account, *honest.accounts[1:]], IDS).contradiction(IDS) == 1
    assert honest.contradiction([*IDS[:-1], 7]) == 0, "it was fed other tokens"
