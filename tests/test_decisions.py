"""The ring of decisions: bounded for each topic, and equal ones are one."""

from __future__ import annotations

from swarmnode.decisions import KEPT, MAX_CHARS, DecisionLog, Topic


def test_one_topic_drives_out_no_other() -> None:
    log = DecisionLog(lambda: 1.0)
    log.record(Topic.PLACEMENT, "takes units [0:4)", ["two had nobody"], units=(0, 4))
    for number in range(10 * KEPT):
        log.record(Topic.ADMISSION, "refuses a session: BUSY", ["x" * 10_000], about=(f"stranger {number}", "trace"))
    assert len(log.about()) == KEPT + 1 and log.about("3")[0].facts == ("two had nobody",)
    assert max(len(fact) for decision in log.about() for fact in decision.facts) == MAX_CHARS


def test_equal_decisions_are_counted_and_the_latest_told_first() -> None:
    now = iter(range(10))
    log = DecisionLog(lambda: float(next(now)))
    for trace in ("aa01", "bb02"):
        log.record(Topic.ADMISSION, "refuses a session: BUSY", [trace], about=("12D3KooWPeer", trace))
    log.record(Topic.LENDING, "was running, is draining")
    assert [(one.topic, one.times, one.at) for one in log.about()] == [
        (Topic.LENDING, 1, 2.0),
        (Topic.ADMISSION, 2, 1.0),
    ]
    assert log.about("bb02") == log.about("KooWPeer") == log.about()[1:]
    assert log.about("aa01") == [] and log.about("someone") == [] and log.about("4") == []
