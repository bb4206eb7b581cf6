import itertools

from swarmnode.plan.view import Span
from swarmnode.plan.virtual_clock import VirtualClock
from swarmnode.simulate.environment.peers import Peer, device_of
from swarmnode.simulate.sessions.serving import SimulatedExecutor, SimulatedJob
from tests.simulate.worlds import model, scenario

HALF, WHOLE = Span(0, 4), Span(0, 8)


class Bench:
    """A worker of 8 units at 8 units/s: one second for a decode step through all."""

    def __init__(self):
        shape = model(8)
        self.clock = VirtualClock()
        self.peer = Peer(0, "a", device_of(scenario([8.0]), 0, shape), 8)
        self.worker = SimulatedExecutor(self.clock, self.peer, shape)
        self.done = []
        self._sessions = itertools.count()

    def submit(self, name, span=WHOLE, tokens=1, then=None):
        def done():
            self.done.append((name, self.clock.now_s))
            if then:
                then()

        self.worker.submit(SimulatedJob(next(self._sessions), span, tokens, done))


def test_steps_that_wait_are_computed_together():
    bench = Bench()
    for name in "abc":
        bench.submit(name)
    bench.clock.run(10)
    assert bench.done == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert bench.peer.busy_s == 2.0


def test_steps_over_other_units_are_a_pass_of_their_own():
    bench = Bench()
    bench.submit("first")
    bench.submit("whole")
    bench.submit("half", HALF)
    bench.clock.run(10)
    assert bench.done == [("first", 1.0), ("whole", 2.5), ("half", 2.5)]


def test_prompts_and_steps_take_turns():
    bench = Bench()
    bench.submit("step 1")
    bench.submit("prompt 1", tokens=32)  # 2 s
    bench.submit("prompt 2", tokens=16)
    bench.submit("step 2")
    bench.clock.run(10)
    # While somebody decodes chunks are short, and longer as soon as their passes have shown that they cost no more.
    assert bench.done == [("step 1", 1.0), ("step 2", 3.0), ("prompt 2", 7.0), ("prompt 1", 9.0)]


def test_what_is_handed_over_by_those_just_done_is_computed_together():
    bench = Bench()
    bench.submit("first")
    for name in "ab":
        bench.submit(name, then=lambda name=name: bench.submit(name + " again"))
    bench.clock.run(10)
    assert bench.done[1:] == [("a", 2.0), ("b", 2.0), ("a again", 3.0), ("b again", 3.0)]


def test_nothing_comes_out_of_a_stopped_worker():
    bench = Bench()
    bench.submit("a")
    bench.submit("b")
    bench.clock.run(0.5)
    bench.worker.stop()
    bench.clock.run(10)
    assert bench.done == []
