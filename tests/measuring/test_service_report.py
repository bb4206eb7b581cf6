"""What a node tells its owner of what it does."""

from __future__ import annotations

from swarmnode.measuring.service_report import ServiceReporter
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.reachability import Reachability


def test_a_report_is_made_where_something_is_new() -> None:
    tokens, sessions, now_s = 0, 0, 0.0

    def readings() -> Readings:
        yield Reading(table.TOKENS, tokens, ("0:3", "decode"))
        yield Reading(table.TOKENS, 10, ("0:3", "prefill"))
        yield Reading(table.SESSIONS, sessions, ("0:3",))

    reporter = ServiceReporter(readings, clock=lambda: now_s)
    now_s = 10.0
    first = reporter.report(Reachability.UNKNOWN)
    assert first is not None and str(first).startswith("10 tokens computed for others; idle now")
    now_s, tokens, sessions = 20.0, 50, 2
    second = reporter.report(Reachability.PUBLIC)
    assert second is not None and (second.tokens, second.sessions, second.tokens_per_s) == (60, 2, 5.0)
    assert "2 sessions now, 5.0 tokens/s; others reach this machine directly" in str(second)
    now_s, sessions = 30.0, 0
    last = reporter.report(Reachability.PUBLIC)
    assert last is not None and last.tokens_per_s == 0.0
    assert reporter.report(Reachability.PUBLIC) is None
