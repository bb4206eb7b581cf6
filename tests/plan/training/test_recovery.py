"""The recovery plan: where a training goes on from, given what the live peers hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.plan.training.coordination import HoldingReport, plan_anew, plan_recovery
from swarmnode.plan.view import Span

UNITS = 3


def ready(start: int, end: int, step: int, *kept: int, reduced: bool = False) -> HoldingReport:
    return HoldingReport(Span(start, end), step, True, reduced, frozenset(kept))


def blank(start: int, end: int, *kept: int) -> HoldingReport:
    return HoldingReport(Span(start, end), 0, False, False, frozenset(kept))


def test_all_at_one_step_stay() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 5), "b": ready(2, 3, 5)}, roll_back=False)
    assert found.step == 5 and found.stay == {"a", "b"} and not found.missing


def test_one_that_missed_the_commit_alone_commits() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 5), "b": ready(2, 3, 4, reduced=True)}, roll_back=False)
    assert found.step == 5 and found.stay == {"a"} and found.commit == {"b"}


def test_nobody_commits_without_somebody_who_heard_the_word() -> None:
    """a has step 5 on its disk alone: the norm of the gradient that led there is lost, so that b cannot come to it."""
    found = plan_recovery(UNITS, {"a": blank(0, 2, 5, 4), "b": ready(2, 3, 4, 4, reduced=True)}, roll_back=True)
    assert found.step == 4 and found.restore == {"a"} and found.stay == {"b"}


def test_one_that_is_behind_syncs_where_others_hold_its_units() -> None:
    reports = {"a": ready(0, 2, 5), "b": ready(2, 3, 5), "c": ready(2, 3, 4), "d": blank(0, 3)}
    found = plan_recovery(UNITS, reports, roll_back=False)
    assert found.stay == {"a", "b"} and found.sync == {"c", "d"} and not found.missing


def test_one_that_is_behind_and_alone_leaves_its_units_missing() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 5), "b": ready(2, 3, 3)}, roll_back=False)
    assert found.missing == (2,)


def test_nobody_holds_a_unit() -> None:
    assert plan_recovery(UNITS, {"a": ready(0, 1, 5), "b": ready(2, 3, 5)}, roll_back=True).missing == (1,)
    assert plan_recovery(UNITS, {}, roll_back=True).missing == (0, 1, 2)


def begun(start: int, end: int, step: int, *kept: int, founded: bool = True) -> HoldingReport:
    return HoldingReport(Span(start, end), step, True, stored_steps=frozenset(kept), founded=founded)


def test_a_first_run_of_which_nothing_is_left_for_some_units_begins_anew() -> None:
    for here in (begun(0, 2, 5), begun(0, 2, 5, 3)):
        found = plan_anew(UNITS, {"a": here, "b": blank(2, 3)}, stored_from=6)
        assert found is not None and found.step == 0 and found.restore == {"a", "b"} and found.anew
        assert not found.missing
    assert plan_anew(UNITS, {"a": begun(0, 1, 5), "b": blank(2, 3)}, stored_from=6) is None, "unit 1 has nobody"


def test_once_a_step_was_due_to_be_kept_its_holder_is_waited_for() -> None:
    assert plan_anew(UNITS, {"a": begun(0, 2, 5), "b": blank(2, 3)}, stored_from=5) is None
    assert plan_anew(UNITS, {"a": ready(0, 2, 7, 5, 0), "b": blank(2, 3, 0)}, stored_from=5) is None


def test_one_alone_does_not_say_that_a_run_is_the_first() -> None:
    others = {"a": begun(0, 2, 5, founded=False), "b": begun(0, 2, 5, founded=False), "d": blank(2, 3)}
    assert plan_anew(UNITS, {**others, "c": begun(0, 2, 5)}, stored_from=50) is None
    assert plan_anew(UNITS, {"c": begun(0, 2, 5), "d": blank(2, 3)}, stored_from=50) is not None


def test_a_later_run_begins_anew_from_the_disks() -> None:
    here = ready(0, 2, 5, 0)
    found = plan_anew(UNITS, {"a": here, "b": blank(2, 3, 0), "c": blank(0, 3)}, stored_from=50)
    assert found is not None and found.step == 0 and found.restore == {"a", "b"} and found.sync == {"c"}
    assert not found.anew, "the swarm was founded with something else"
    assert plan_anew(UNITS, {"a": here, "b": blank(2, 3)}, stored_from=50) is None, "unit 2 is on no disk"


def test_rolling_back_takes_the_newest_step_that_all_units_have() -> None:
    reports = {"a": ready(0, 2, 7, 6, 4, 2), "b": blank(2, 3, 4, 2), "c": blank(0, 2, 2)}
    assert plan_recovery(UNITS, reports, roll_back=False).missing == (2,)
    found = plan_recovery(UNITS, reports, roll_back=True)
    assert found.step == 4 and found.restore == {"a", "b"} and found.sync == {"c"}


def test_a_step_in_memory_counts_with_others_on_disk() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 6), "b": blank(2, 3, 6, 4)}, roll_back=True)
    assert found.step == 6 and found.stay == {"a"} and found.restore == {"b"}


def test_a_run_is_never_thrown_away_for_a_newcomer() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 6), "b": ready(2, 3, 0)}, roll_back=True)
    assert found.missing == (2,) and found.step == 6


def test_a_fresh_swarm_begins_at_step_0() -> None:
    found = plan_recovery(UNITS, {"a": ready(0, 2, 0), "b": ready(2, 3, 0)}, roll_back=False)
    assert found.step == 0 and found.stay == {"a", "b"}


reports = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda start, length, step, is_ready, reduced, kept: HoldingReport(
            Span(start, min(UNITS, start + length)), step if is_ready else 0, is_ready, is_ready and reduced, kept
        ),
        st.integers(0, UNITS - 1),
        st.integers(1, UNITS),
        st.integers(0, 4),
        st.booleans(),
        st.booleans(),
        st.frozensets(st.integers(0, 4), max_size=3),
    ),
)


@settings(max_examples=300, deadline=None)
@given(held=reports, roll_back=st.booleans())
def test_everybody_has_one_thing_to_do_and_is_able_to(held: dict[str, HoldingReport], roll_back: bool) -> None:
    found = plan_recovery(UNITS, held, roll_back=roll_back)
    parts = (found.stay, found.commit, found.restore, found.sync)
    assert sorted(peer for part in parts for peer in part) == sorted(held)
    assert all(held[peer].ready and held[peer].step == found.step for peer in found.stay)
    assert all(held[peer].reduced and held[peer].step == found.step - 1 for peer in found.commit)
    assert found.stay or not found.commit
    assert all(roll_back and found.step in held[peer].stored_steps for peer in found.restore)
    covered = {unit for peer in found.stay | found.commit | found.restore for unit in range(*held[peer].span)}
    assert set(found.missing) == set(range(UNITS)) - covered


@settings(max_examples=200, deadline=None)
@given(held=reports)
def test_the_order_of_reports_does_not_matter(held: dict[str, HoldingReport]) -> None:
    backwards = dict(reversed(held.items()))
    assert plan_recovery(UNITS, held, roll_back=True) == plan_recovery(UNITS, backwards, roll_back=True)
