import json
import random

import pytest

from swarmnode.errors import UsageError
from swarmnode.simulate.environment.peers import Change, read_trace, steady_churn


def test_peers_leave_at_the_rate_and_others_come():
    changes = steady_churn(1000, 0.1, 3600.0, random.Random(1))
    leaves = sum(not change.up for change in changes)
    assert 70 < leaves < 130  # of 1000 peers a tenth in an hour, with a Poisson's spread
    assert changes == sorted(changes)
    for device in range(1000):
        states = [change.up for change in changes if change.device == device]
        assert states == [index % 2 == 1 for index in range(len(states))]


def test_no_rate_no_churn():
    assert steady_churn(10, 0.0, 1e6, random.Random(1)) == []


def test_a_trace_is_read_in_order(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps([[9, 1, "up"], [2.5, 1, "down"]]))
    assert read_trace(file, 2) == [Change(2.5, 1, False), Change(9.0, 1, True)]


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", "[[1, 2]]", '[[1, 5, "up"]]', '[[-1, 0, "up"]]', '[[1, 0, "away"]]', '[[1, true, "up"]]',
     '[["1", 0, "up"]]', "[[NaN, 0, \"up\"]]"],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, content):
    file = tmp_path / "trace.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="trace"):
        read_trace(file, 2)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json"):
        read_trace(tmp_path / "none.json", 2)
