from swarmnode.plan.virtual_clock import VirtualClock


def test_actions_happen_in_the_order_of_their_times_and_then_of_planning():
    clock, seen = VirtualClock(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.5, "b")):
        clock.at(time_s, lambda name=name: seen.append((name, clock.now_s)))
    clock.run(10.0)
    assert seen == [("a", 1.0), ("b", 1.5), ("c", 2.0), ("d", 2.0)]
    assert clock.now_s == 10.0
    assert clock.events == 4


def test_an_action_may_plan_others_and_none_happens_after_the_end():
    clock, ticks = VirtualClock(), []

    def tick():
        ticks.append(clock.now_s)
        clock.after(1.0, tick)

    tick()
    clock.run(3.5)
    assert ticks == [0.0, 1.0, 2.0, 3.0]
    clock.run(4.0)
    assert ticks[-1] == 4.0


def test_the_past_is_now():
    clock, seen = VirtualClock(), []
    clock.run(5.0)
    clock.at(1.0, lambda: seen.append(clock.now_s))
    clock.run(5.0)
    assert seen == [5.0]
