"""A peer changes the last bit of one number of a prompt, which the noise of fast products between kinds of CPUs would hide."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from attack import Outcome, main
from torch import Tensor

from swarmnode.founding.model_source import from_checkpoint
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.node.audited_swarm import hop_in_use, results, tamper, three_by_two

VIRTUAL, FAST = True, False
PROMPT, SESSIONS = [5, 80, 3, 61, 17, 200, 9], 12  # three of four audits are by peers of the liar's class


def one_bit(hidden_BTH: Tensor) -> Tensor:
    """Change the last bit of one number of a prompt, and nothing in steps."""
    if hidden_BTH.shape[1] > 1:
        hidden_BTH = hidden_BTH.clone()
        hidden_BTH[0, 1, 5] = hidden_BTH[0, 1, 5].nextafter(torch.tensor(torch.inf))
    return hidden_BTH


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        save_llama_gguf(Path(folder, "tiny.gguf"), form="Q4_0")
        source = from_checkpoint(str(Path(folder, "tiny.gguf")), Path(folder, "packed"), packs=True)
        stages = {"spans": ("0:2", "2:4"), "products": "fast"}
        async with three_by_two(lambda swarm: swarm.create(source), Path(folder), **stages) as (swarm, client):
            liar = await hop_in_use(swarm, client, 0)
            tamper(liar, one_bit)
            sessions = 0
            while sessions < SESSIONS and not client.auditor.standing.shunned:
                sessions += 1
                await client.generate(PROMPT, max_new_tokens=24, drafts="off")
                await client.auditor.idle()
            shunned = client.auditor.standing.shunned
            return Outcome(
                shunned == {liar.peer},
                f"after {sessions} sessions {len(shunned & {liar.peer})} liar and {len(shunned - {liar.peer})} honest peers are "
                f"left out; audits: {results(client)}",
            )


main(__name__, attack, virtual=VIRTUAL)
