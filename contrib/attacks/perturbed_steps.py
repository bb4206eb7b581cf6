"""A peer perturbs one of ten steps by five times the noise of honest peers, which changes the text now and then."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out

from tests.node.audited_swarm import noise_on_every_tenth, tamper

VIRTUAL, FAST = True, False
FIVE_TIMES_THE_NOISE = 1e-6  # noise of float32: contrib/benchmarks/audits.py finds 1.2e-7 to 2e-7


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, noise_on_every_tenth(FIVE_TIMES_THE_NOISE)))


main(__name__, attack, virtual=VIRTUAL)
