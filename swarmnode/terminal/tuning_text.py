"""Text of a tuning's plan, which a user reads before the tuning begins."""

from __future__ import annotations

from swarmnode.client.tuning.plan import TuningPlan
from swarmnode.counting import counted, format_bytes, layers
from swarmnode.terminal.formatting import format_duration


def plan_lines(plan: TuningPlan) -> list[str]:
    """Return the lines of a plan: recipe, expected time, and what each peer holds and sees."""
    lines = [recipe_line(plan)]
    if plan.step_s:
        whole = format_duration(plan.step_s * plan.run.steps)
        lines.append(f"Expected: {plan.step_s:.2g} s a step, {whole} in all, if nothing else runs on these machines")
    for one in plan.hops:
        kept, passing = format_bytes(one.held.adapter_bytes), format_bytes(one.held.pass_bytes)
        seen = f"; its owner could see {', '.join(one.sees)}" if one.sees else ""
        lines.append(
            f"{one.name} holds {layers(one.hop.start, one.hop.end)}: {kept} of adapter and optimiser, up to {passing} of "
            f"passes{seen}"
        )
    return lines


def recipe_line(plan: TuningPlan) -> str:
    """Return the recipe and the size of a step in one line."""
    recipe, run = plan.recipe, plan.run
    if recipe.method == "prompt":
        what = f"soft prompt of {recipe.prompt_tokens} tokens"
    else:
        targets = recipe.targets if isinstance(recipe.targets, str) else ", ".join(recipe.targets)
        scaled = " with rsLoRA" if recipe.rslora else ""
        what = f"{recipe.method} of rank {recipe.rank} and alpha {recipe.alpha:g}{scaled} on {targets}"
    size = f"{counted(run.batch, 'row')} of {run.sequence} tokens, {run.microbatch} at a time"
    return f"Tuning: {what}; {counted(run.steps, 'step')} of {size}; learning rate {run.learning_rate:g}"
