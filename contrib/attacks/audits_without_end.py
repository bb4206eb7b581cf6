"""A client asks a hop for statements of one session without end: each makes the hop hash all that the session carried."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.audit_messages import SEED_BYTES, GetStatement, StatementReply
from swarmnode.errors import PeerRefused
from swarmnode.peer.questions import ask_one
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

VIRTUAL, FAST = True, True
QUESTIONS, MOST, NEW = 40, 8, 8  # asked, and answered at most: four times as many as an audit of so short a text needs


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        async with VirtualSwarm(Path(folder)) as swarm:
            swarm.create(TinyModel.save(Path(folder, "model")).folder)
            await swarm.bootstrap()
            await swarm.node("a", "0:6").wait_for("ready")
            async with swarm.client() as client:
                stream = await client.stream(PROMPT, max_new_tokens=NEW)
                tokens = aiter(stream)
                await anext(tokens)
                session, answered = stream._ring.session, 0
                board, hop = client.auditor.replays.statements, session.route[0]
                for number in range(QUESTIONS):
                    question = GetStatement(session.id, number.to_bytes(SEED_BYTES, "big"), 0, 1)
                    with contextlib.suppress(PeerRefused):
                        await ask_one(board, hop.peer, question, StatementReply)
                        answered += 1
                rest = [token async for token in tokens]
    return Outcome(
        0 < answered <= MOST and len(rest) == NEW - 1,
        f"of {QUESTIONS} questions about one session {answered} were answered; its text went on by {len(rest)} tokens",
    )


main(__name__, attack, virtual=VIRTUAL)
