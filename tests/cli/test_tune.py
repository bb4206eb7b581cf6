"""Options of `tune` that do not go together are refused before anything is read."""

from __future__ import annotations

import pytest

from swarmnode.cli.train.tune import AdapterOptions, TuneSteps, TuneTogether
from swarmnode.errors import UsageError


def test_followers_take_the_leaders_settings_and_only_a_leader_has_options_of_averaging() -> None:
    assert AdapterOptions() == AdapterOptions() and TuneSteps() == TuneSteps(), "options that are not given are equal"
    assert TuneTogether(share=True, trainers=3, average_every=4).settings()["trainers"] == 3
    assert TuneTogether(join="tune1abc").settings(False)["ticket"] == "tune1abc"
    assert TuneTogether().settings(True)["trainers"] == 0
    for together, led in (
        (TuneTogether(join="tune1abc"), AdapterOptions(rank=8) != AdapterOptions()),
        (TuneTogether(join="tune1abc"), TuneSteps(steps=5) != TuneSteps()),
        (TuneTogether(join="tune1abc", share=True), False),
    ):
        with pytest.raises(UsageError, match="--join takes the leader's settings"):
            together.settings(led)
    for together in (TuneTogether(average_every=4), TuneTogether(trainers=2), TuneTogether(average_codec="int8")):
        with pytest.raises(UsageError, match="need --share"):
            together.settings()
