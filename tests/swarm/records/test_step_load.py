"""What a step asks, as those who train tell it."""

from __future__ import annotations

from swarmnode.swarm.records.announcement import StepLoad, middle_load


def test_the_middle_one_counts_figure_by_figure() -> None:
    """Of three nobody alone says what the others compute by, nor of two who says most."""
    honest, liar = StepLoad(16, 1024, 4000), StepLoad(2**32 - 1, 1, 0)
    assert middle_load([honest, liar, honest]) == honest
    assert middle_load([honest, liar]) == StepLoad(16, 1, 0)


def test_who_knows_of_no_run_says_nothing() -> None:
    load = StepLoad(16, 1024, 4000)
    assert middle_load([StepLoad(), load, StepLoad(), StepLoad(0, 5, 5), StepLoad(5, 0, 5)]) == load
    assert middle_load([]) == middle_load([StepLoad()]) == StepLoad()
