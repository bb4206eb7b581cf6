"""A peer moves two of 64 channels by half of their spread at each 16th step, which audits of bfloat16 take for noise."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from attack import Outcome, main
from torch import Tensor

from tests.node.audited_swarm import TOKENS, Change, hop_in_use, tamper, three_by_two
from tests.tiny import TinyModel

VIRTUAL, FAST = True, False
CHANNELS, SPREAD, EVERY = 2, 0.5, 16
SESSIONS = 60  # some eight near misses are needed, and not each audit falls on the liar


def channels_off(channels: int = CHANNELS, spread: float = SPREAD, every: int = EVERY) -> Change:
    """Return a change that adds `spread` standard deviations to the first `channels` at one of `every` passes."""
    passes = 0

    def change(hidden_BTH: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        if passes % every:
            return hidden_BTH
        moved_BTH = torch.clone(hidden_BTH)
        moved_BTH[..., :channels] += spread * hidden_BTH.std()
        return moved_BTH

    return change


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel.save(Path(folder, "model")).folder
        async with three_by_two(lambda swarm: swarm.create(model), Path(folder), dtype="bfloat16") as (swarm, client):
            liar = await hop_in_use(swarm, client, 0)
            await client.auditor.idle()
            tamper(liar, channels_off())
            standing, trusted, session = client.auditor.standing, 0.0, 0
            while session < SESSIONS and not standing.shunned:
                session += 1
                prompt = [(7 * session + 13 * at) % 512 for at in range(8)]
                await client.generate(prompt, max_new_tokens=TOKENS, drafts="off")
                await client.auditor.idle()
                trusted = max(trusted, standing.trust(liar.peer))
            out = "is left out" if liar.peer in standing.shunned else "stays"
            return Outcome(
                standing.shunned == {liar.peer},
                f"the liar {out} after {session} sessions, was trusted {trusted:.0%} at most, and "
                f"{len(standing.shunned - {liar.peer})} honest peers are left out",
            )


main(__name__, attack, virtual=VIRTUAL)
