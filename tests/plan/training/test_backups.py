"""Which states are kept elsewhere, at whom, and how often."""

from __future__ import annotations

from swarmnode.codec.body import SHARED
from swarmnode.plan.training.backups import LEAST_BPS, disks, holds, lacking, learnt_alone, next_step, rate_bps
from swarmnode.swarm.records.announcement import VERSION, Announcement, State
from swarmnode.swarm.storage.state_store import STRIDES

UNITS = 4


def peer(
    name: str,
    span: tuple[int, int] = (0, 0),
    room: int = 0,
    *,
    address: str = "",
    state: State = State.READY,
    step: int = 0,
) -> Announcement:
    said = {"addresses": (f"/ip4/{address}/tcp/1",) if address else (), "backup_bytes": room, "training_step": step}
    return Announcement(VERSION, bytes(32), name, 1, 0.0, 60.0, 0.0, state, span, **said)  # type: ignore[arg-type]


def test_a_unit_lacks_what_others_do_not_hold() -> None:
    announced = [peer("own", (0, 4)), peer("half", (0, 2)), peer("leaving", (2, 4), state=State.DRAINING)]
    assert [lacking(announced, "own", unit, UNITS, 2) for unit in range(UNITS)] == [0, 0, 1, 1]
    assert lacking(announced, "own", 3, UNITS, 3) == 2 and lacking(announced, "own", 3, UNITS, 1) == 0
    assert lacking(announced, "own", SHARED, UNITS, 2) == 0, "the half holds one of the ends"


def test_nobody_has_learnt_something_by_its_own_word_alone() -> None:
    announced = [peer("own", (0, 4), step=9), peer("replica", (0, 2), step=9), peer("liar", (0, 4), step=9)]
    assert learnt_alone(announced, "own", range(4), UNITS) == []
    assert learnt_alone([*announced[:2], peer("new", (0, 4))], "own", range(4), UNITS) == [2, 3]
    met = {0: {"own", "replica"}, 1: {"own", "replica"}, 2: {"own", "gone"}}
    assert learnt_alone(announced, "own", range(4), UNITS, met) == [2, 3]


def test_what_is_shared_belongs_to_both_ends() -> None:
    assert holds(peer("front", (0, 1)), SHARED, UNITS) and holds(peer("back", (3, 4)), SHARED, UNITS)
    assert not holds(peer("middle", (1, 3)), SHARED, UNITS)


def test_disks_of_those_who_hold_nothing_and_are_elsewhere_come_first() -> None:
    announced = [
        peer("own", (2, 4), 100, address="85.0.113.7"),
        peer("replica", (2, 3), 100),
        peer("full", (0, 0), 9),
        peer("trains", (0, 2), 100),
        peer("house", (0, 0), 100, address="85.0.113.8"),
        peer("paused", (0, 0), 100, state=State.PAUSED),
        peer("door", (0, 0), 10),
    ]
    assert disks(announced, "own", 2, UNITS, 10) == ["door", "trains", "house"]
    assert disks(announced, "stranger", 3, UNITS, 1000) == []


def test_a_budget_is_a_share_of_what_leaves() -> None:
    assert rate_bps(40e6, None) == 10e6 and rate_bps(40e6, 8e6) == 2e6
    assert rate_bps(0.0, None) == 2e6 and rate_bps(0.0, 100e6) == 25e6 and rate_bps(1e3, None) == LEAST_BPS


def test_every_checkpoint_as_far_as_the_uplink_follows() -> None:
    assert next_step((10, 20, 30, 33), -1, 10, 95) == 30
    assert next_step((10, 20, 30, 33), 30, 10, 95) is None
    assert next_step((20, 30, 40, 43), 30, 10, 95) == 40
    assert next_step((30, 40, 50, 60), 30, 10, 95) == 40, "three checkpoints late: every fourth"
    assert next_step((40, 50, 60, 70), 40, 10, 95) is None, "until the next fourth one comes"
    assert next_step((80, 90, 160, 170, 180), 90, 10, 1000) == 160
    assert next_step((70, 80, 90, 95), 80, 10, 95) == 95, "the last one whatever its number"


def test_the_first_one_waits_for_a_step_that_others_keep_long_enough() -> None:
    assert next_step((10, 20, 30), -1, 10, 95, late=2.5) is None
    assert next_step((20, 30, 40), -1, 10, 95, late=2.5) == 40
    assert next_step((140, 150, 160), -1, 10, 1000, late=float("inf")) == 160


def test_writers_with_unlike_uplinks_have_steps_in_common() -> None:
    """One brings each checkpoint away in no time, one needs three checkpoints' time for it, one seven: at any time all of them have
    brought away a step that a node keeps beside its newest three."""
    took = {"fast": 0, "slow": 3, "slower": 7}
    away = {name: [-1] for name in took}
    busy = dict.fromkeys(took, (0, -1))  # until which checkpoint, with which step
    for newest in range(100):
        named = list(range(newest + 1))
        kept = {*named[-3:]} | {step for stride in STRIDES[1:] for step in [n for n in named if n % stride == 0][-2:]}
        for name, pace in took.items():
            until, step = busy[name]
            if newest >= until:
                if step >= 0:
                    away[name].append(step)
                following = next_step(sorted(kept), away[name][-1], 1, 10**6)
                busy[name] = (newest + pace, following) if following is not None else (newest, -1)
        if newest > 40:
            common = set.intersection(*(set(steps[-2:]) | {s for s in steps if s in kept} for steps in away.values()))
            assert common & kept, (newest, {name: steps[-3:] for name, steps in away.items()})
