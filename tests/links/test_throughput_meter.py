"""How fast frames came, by what each read has brought."""

from __future__ import annotations

import pytest

from swarmnode.links.link_statistics import FRAMES_KEPT, KEPT_S, MEASURED_BYTES, Arrivals, ThroughputMeter

READ_BYTES, FRAME_BYTES = 32 * 1024, 512 * 1024
LINE_BPS = 20e6


class Watch:
    """A clock that reads move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.arrivals = Arrivals()
        self.meter = ThroughputMeter(lambda: self.now_s, self.arrivals)

    def frame(self, bits_per_s: float, size_bytes: int = FRAME_BYTES) -> None:
        """One, read by read."""
        for pending_bytes in (*range(READ_BYTES, size_bytes, READ_BYTES), 0):
            self.now_s += 8 * READ_BYTES / bits_per_s
            self.meter.record(READ_BYTES, pending_bytes)


def test_the_rate_of_a_line() -> None:
    watch = Watch()
    watch.frame(LINE_BPS, MEASURED_BYTES)
    assert watch.meter.rate_bps is None, "its first read says nothing, and the rest is too little"
    watch.frame(LINE_BPS)
    assert watch.meter.rate_bps == pytest.approx(LINE_BPS)


@pytest.mark.parametrize("bits_per_s", [1e12, 1e6])
def test_a_frame_that_waited_to_be_read_or_sent_says_nothing_of_the_line(bits_per_s: float) -> None:
    """The one comes in no time, as from a buffer it does; the other as if the line were slow."""
    watch = Watch()
    for number in range(12):
        watch.frame(bits_per_s if number % 3 == 2 else LINE_BPS)
        assert watch.meter.rate_bps == pytest.approx(LINE_BPS)


def test_a_line_that_has_changed_is_known_after_a_few_frames() -> None:
    watch = Watch()
    for _ in range(FRAMES_KEPT):
        watch.frame(LINE_BPS)
    for _ in range(FRAMES_KEPT // 2 + 1):
        watch.frame(LINE_BPS / 10)
    assert watch.meter.rate_bps == pytest.approx(LINE_BPS / 10)


def test_on_a_path_with_few_frames_the_newest_counts_alone() -> None:
    watch = Watch()
    for _ in range(FRAMES_KEPT):
        watch.frame(LINE_BPS)
    watch.now_s += KEPT_S
    watch.frame(LINE_BPS / 10)
    assert watch.meter.rate_bps == pytest.approx(LINE_BPS / 10)


def test_frames_on_two_links_at_once_share_the_line() -> None:
    """Each alone comes at half the line's rate; and what comes of the peer comes at the line's."""
    now_s, arrivals = 0.0, Arrivals()
    meters = [ThroughputMeter(lambda: now_s, arrivals) for _ in range(2)]
    for pending_bytes in (*range(READ_BYTES, FRAME_BYTES, READ_BYTES), 0):
        for meter in meters:
            now_s += 8 * READ_BYTES / LINE_BPS
            meter.record(READ_BYTES, pending_bytes)
    for meter in meters:
        assert meter.rate_bps == pytest.approx(LINE_BPS, rel=0.05)


def test_a_link_that_is_quiet_tells_what_the_busy_one_measures() -> None:
    watch = Watch()
    watch.frame(LINE_BPS)
    quiet = ThroughputMeter(lambda: watch.now_s, watch.arrivals)
    for _ in range(FRAMES_KEPT):
        watch.frame(LINE_BPS / 10)
    assert quiet.rate_bps == pytest.approx(LINE_BPS / 10)
