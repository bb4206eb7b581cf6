"""Text of a tuning's plan, which a user reads before the tuning begins."""

from __future__ import annotations

from swarmnode.client.tuning.job import PlannedHop, TuningPlan
from swarmnode.counting import counted, format_bytes, layers
from swarmnode.terminal.formatting import format_duration


def plan_lines(plan: TuningPlan) -> list[str]:
    """Return the lines of a plan: recipe, expected time, and what each peer holds and sees."""
    lines = [recipe_line(plan)]
    left = plan.run.steps - plan.step
    if plan.step_s:
        rest = format_duration(plan.step_s * left)
        which = "in all" if not plan.step else f"for the {counted(left, 'step')} left"
        lines.append(f"Expected: {plan.step_s:.2g} s a step, {rest} {which}, if nothing else runs on these machines")
    return lines + [hop_line(one) for one in plan.hops]


def change_lines(before: TuningPlan, plan: TuningPlan) -> list[str]:
    """Return the lines of a plan after a fault or a departure: where it goes on, and the peers that are other ones than before."""
    known = [hop_line(one) for one in before.hops]
    lines = [hop_line(one) for one in plan.hops]
    why = f": {plan.why}" if plan.why else ""
    for one in before.hops:
        why = why.replace(f"peer {one.hop.peer}", one.name)  # as the plan above calls it
    return [f"Going on from step {plan.step}{why}", *(line for line in lines if line not in known)]


def hop_line(one: PlannedHop) -> str:
    """Return what a peer holds and sees in one line."""
    kept, passing = format_bytes(one.held.adapter_bytes), format_bytes(one.held.pass_bytes)
    seen = f"; its owner could see {', '.join(one.sees)}" if one.sees else ""
    held = f"{one.name} holds {layers(one.hop.start, one.hop.end)}"
    return f"{held}: {kept} of adapter and optimiser, up to {passing} of passes{seen}"


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
