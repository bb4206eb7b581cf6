"""A client asks a hop for statements of one session without end: each makes the hop hash all that the session carried."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.audit_messages import MAX_SKETCHED, SEED_BYTES, GetStatement, StatementReply
from swarmnode.errors import PeerRefused
from swarmnode.peer.questions import ask_one
from tests.node.audited_swarm import ALWAYS, results
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

VIRTUAL, FAST = True, True
QUESTIONS, MOST = 100, 16  # asked, and answered at most: eight times as many as an audit of so short a text needs


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with VirtualSwarm(Path(folder)) as swarm:
            swarm.create(TinyModel.save(Path(folder, "model")).folder)
            await swarm.bootstrap()
            for name in ("a", "b"):
                await swarm.node(name, "0:6").wait_for("ready")
            async with swarm.client() as attacker, swarm.client(audit_share=ALWAYS) as client:
                stream = await attacker.stream(PROMPT, max_new_tokens=16)
                tokens = aiter(stream)
                await anext(tokens)
                session = stream._ring.session
                hop, answered = session.route[0], 0
                for number in range(QUESTIONS):
                    seed = number.to_bytes(SEED_BYTES, "big")
                    question = GetStatement(session.id, seed, 0, 1)
                    try:
                        await ask_one(attacker.auditor.replays.statements, hop.peer, question, StatementReply)
                        answered += 1
                    except PeerRefused:
                        pass
                rest = [token async for token in tokens]
                await client.generate(PROMPT, max_new_tokens=16)
                await client.auditor.idle()
                passed = results(client).get("passed", 0)
    return Outcome(
        answered <= MOST and len(rest) == 15 and passed == 1,
        f"of {QUESTIONS} questions about {len(PROMPT)} to {MAX_SKETCHED} positions {answered} were answered; its text went on by "
        f"{len(rest)} tokens, and {passed:.0f} audit of another client passed",
    )


main(__name__, attack, virtual=VIRTUAL)
