"""A peer serves truly, and computes falsely when an auditor asks it to check others, so that these look false."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main
from torch import Tensor

from tests.node.audited_swarm import TOKENS, hop_in_use, results, tamper, three_by_two
from tests.tiny import PROMPT, TinyModel

VIRTUAL, FAST = True, False
SESSIONS, SIZE = 12, 1e-3


def lie_of_texts(hidden_BTH: Tensor) -> Tensor:
    """Falsify a pass with more positions than this client's prompt, as in an audit; leave shorter ones true."""
    return hidden_BTH * (1 + SIZE) if hidden_BTH.shape[1] > len(PROMPT) else hidden_BTH


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel.save(Path(folder, "model")).folder
        async with three_by_two(lambda swarm: swarm.create(model), Path(folder)) as (swarm, client):
            used = await hop_in_use(swarm, client, 0)
            liar = next(swarm.members[name] for name in ("a0", "a1", "a2") if swarm.members[name] is not used)
            tamper(liar, lie_of_texts)
            for number in range(SESSIONS):
                await client.generate(PROMPT, max_new_tokens=TOKENS, temperature=1.0, seed=number)
                await client.auditor.idle()
            standing = client.auditor.standing
            honest = {member.peer for member in swarm.members.values() if member is not liar}
            return Outcome(
                not standing.shunned & honest and liar.peer in standing.shunned,
                f"of {SESSIONS} audits {results(client)}; left out: {len(standing.shunned & honest)} honest peers, "
                f"{len(standing.shunned - honest)} liar",
            )


main(__name__, attack, virtual=VIRTUAL)
