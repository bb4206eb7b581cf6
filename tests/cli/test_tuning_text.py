"""Lines that `tune` prints about a route: the whole plan once, later the changes alone."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.client.tuning.tuning_job import PlannedHop, TuningPlan
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.swarm.records.run import Run
from swarmnode.terminal.training_view import change_lines, plan_lines

RUN = Run(data=bytes(32), steps=8, batch=8, microbatch=4, sequence=128)


def hop(name: str, start: int, end: int) -> PlannedHop:
    return PlannedHop(
        name, HopSpec(f"12D3KooW{name}", start, end), AdapterOpened(1000, 2000), ("activations", "gradients")
    )


PLAN = TuningPlan(AdapterRecipe(), RUN, 0, (hop("ada", 0, 2), hop("bob", 2, 4)), 0.5)


def test_a_plan_tells_the_recipe_the_time_and_what_each_peer_holds() -> None:
    recipe, expected, first, last = plan_lines(PLAN)
    assert recipe.startswith(
        "Tuning: lora of rank 16 and alpha 32 on all-linear; 8 steps of 8 rows of 128 tokens, 4 at a time"
    )
    assert expected == "Expected: 0.5 s a step, 4 s in all, if nothing else runs on these machines"
    held = "1 kB of adapter and optimiser, up to 2 kB of passes; its owner could see activations, gradients"
    assert (first, last) == (f"ada holds layers 0 to 1: {held}", f"bob holds layers 2 to 3: {held}")
    assert plan_lines(replace(PLAN, step=6))[1].startswith("Expected: 0.5 s a step, 1 s for the 2 steps left")


def test_another_route_tells_where_it_goes_on_and_the_other_peers() -> None:
    again = replace(PLAN, step=4, step_s=0.7, why="peer 12D3KooWbob is gone")
    assert change_lines(PLAN, again) == ["Going on from step 4: bob is gone"]
    _, other = change_lines(PLAN, replace(PLAN, step=4, hops=(PLAN.hops[0], hop("eve", 2, 4))))
    assert other.startswith("eve holds layers 2 to 3")
