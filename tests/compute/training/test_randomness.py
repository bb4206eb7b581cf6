"""Seeds of microbatches and units."""

from __future__ import annotations

import torch

from swarmnode.compute.training.randomness import microbatch_seed, reseed

CPU = torch.device("cpu")


def test_every_microbatch_and_unit_draws_its_own() -> None:
    seeds = {microbatch_seed(run, step, index) for run in range(3) for step in range(20) for index in range(20)}
    assert len(seeds) == 3 * 20 * 20 and all(0 <= seed < 1 << 63 for seed in seeds)
    drawn = set()
    for seed in list(seeds)[:20]:
        for unit in range(20):
            reseed(seed, unit, CPU)
            drawn.add(float(torch.rand((), dtype=torch.float64)))
    assert len(drawn) == 400


def test_the_same_draws_the_same() -> None:
    assert microbatch_seed(1, 2, 3) == 6520558355739401531  # peers of any version must agree
    reseed(5, 1, CPU)
    first = torch.rand(4)
    torch.rand(9)
    reseed(5, 1, CPU)
    assert torch.equal(torch.rand(4), first)
