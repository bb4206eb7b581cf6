"""Unix time that a jump of the machine's clock does not move."""

from __future__ import annotations

import pytest

from swarmnode.net.clock import MACHINE_CLOCK, SLEWED_S, Clock, SteadyTime

STARTED = 1_790_000_000.0


class Machine:
    """A machine's clock and its uptime."""

    def __init__(self) -> None:
        self.wall_s, self.uptime_s = STARTED, 70.0
        self.time = SteadyTime(lambda: self.wall_s, lambda: self.uptime_s)

    def run(self, seconds: float, rate: float = 1.0) -> None:
        """Let time pass; the clock goes at `rate`."""
        self.wall_s += rate * seconds
        self.uptime_s += seconds


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, -1.01 * SLEWED_S, 1.01 * SLEWED_S, 3600.0, 1e9])
def test_a_jump_is_told_and_not_followed_until_it_is_wanted(jump_s: float) -> None:
    machine = Machine()
    machine.wall_s += jump_s
    machine.run(60.0)
    assert machine.time() == pytest.approx(STARTED + 60.0) and machine.time.jumped_s == pytest.approx(jump_s)
    machine.wall_s -= jump_s  # set right again
    assert machine.time.jumped_s == 0 and machine.time() == pytest.approx(STARTED + 60.0)
    machine.wall_s += jump_s
    machine.time.follow()
    assert machine.time() == machine.wall_s and machine.time.jumped_s == 0


def test_a_clock_that_runs_a_little_wrong_is_followed() -> None:
    machine = Machine()
    for _ in range(10_000):
        machine.run(10.0, rate=1.01)
        assert machine.time() == pytest.approx(machine.wall_s)
    assert machine.time.jumped_s == 0


def test_the_machines_clocks_agree() -> None:
    time = MACHINE_CLOCK.steady_time()
    assert time.jumped_s == 0.0 and abs(time() - MACHINE_CLOCK.unix()) < SLEWED_S
    assert Clock().steady_time().jumped_s == 0.0
