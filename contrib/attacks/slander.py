"""A client reports honest peers to the swarm, with statements that they signed, so that others leave them out."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.audits.audit_case import fetch_account
from swarmnode.audits.auditor import PROMPT_TOKENS
from swarmnode.codec.audit_messages import SEED_BYTES
from tests.node.audited_swarm import ALWAYS, TOKENS, three_by_two
from tests.tiny import PROMPT, TinyModel

VIRTUAL, FAST = True, False


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel.save(Path(folder, "model")).folder
        async with (
            three_by_two(lambda swarm: swarm.create(model), Path(folder)) as (swarm, liar),
            swarm.client(audit_share=ALWAYS) as reader,
        ):
            stream = await liar.stream(PROMPT, max_new_tokens=TOKENS)
            tokens = aiter(stream)
            ids = [*range(PROMPT_TOKENS), *[(await anext(tokens)).id for _ in range(8)]]
            session = stream._ring.session
            asked = session.id, bytes(SEED_BYTES), len(PROMPT), liar._host.swarm.id
            for hop in session.route:
                said = await fetch_account(liar.auditor.replays.statements, hop.peer, *asked)
                await liar.reports._publish(ids, said)
            await tokens.aclose()
            for _ in session.route:
                await reader.reports.check_reports()
            standing = reader.auditor.standing
            return Outcome(
                not standing.shunned and standing.doubted == {liar.peer_id},
                f"{len(session.route)} honest peers reported, {len(standing.shunned)} left out; in doubt is "
                f"{'the author' if standing.doubted == {liar.peer_id} else len(standing.doubted)}",
            )


main(__name__, attack, virtual=VIRTUAL)
