"""A peer perturbs one of ten steps by more than the noise of honest peers, which changes the text now and then."""

from __future__ import annotations

from attack import Outcome, main
from liar import found_out

from tests.node.audited_swarm import noise_on_every_tenth, tamper

VIRTUAL, FAST = True, False
BEYOND_NOISE = 5e-5  # of float32: honest positions of trained models lie at up to 4.5e-5


async def attack() -> Outcome:
    return await found_out(lambda member, _model: tamper(member, noise_on_every_tenth(BEYOND_NOISE)))


main(__name__, attack, virtual=VIRTUAL)
