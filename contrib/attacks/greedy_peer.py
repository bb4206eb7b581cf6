"""A peer opens sixty sessions at a stage, and sends it endless prompts beside them, so that others wait for their tokens."""

from __future__ import annotations

from attack import Outcome, main

from swarmnode.plan.serving.scheduler import SLOWDOWN
from tests.plan.serving.stage import open_greedy, p99_s, with_others

VIRTUAL, FAST = True, True
STEPS, PROMPTS, PROMPT_TOKENS = 60, 20, 100_000


async def attack() -> Outcome:
    usual_s = p99_s(with_others())
    stage = with_others()
    for session in open_greedy(stage, STEPS):
        stage.scheduler.add(session, 1)
        stage.decoding.add(session)
    for session in open_greedy(stage, PROMPTS):
        stage.scheduler.add(session, PROMPT_TOKENS)
    attacked_s = p99_s(stage)
    return Outcome(
        attacked_s <= SLOWDOWN * usual_s,
        f"of a hundred waits for a token the longest took {1e3 * attacked_s:.1f} ms, {1e3 * usual_s:.1f} without the attack",
    )


main(__name__, attack, virtual=VIRTUAL)
