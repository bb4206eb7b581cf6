"""The parts of guessing, each alone: what is in flight, what is taken back, what is dropped, and what is drawn."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from swarmnode.codec.messages import Drafts, Input, ProposerKind, Want
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.serving.sampler import Drawn, Guess, Sampler
from swarmnode.links.hop import Entry, until
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.client.generation import drafts_in
from swarmnode.serving.drafting.session_guesses import DraftLead, GuessedJobs, Retractions
from swarmnode.serving.job import ForwardHidden, Job, cut, drop_from, entries_of, merge, next_job
from swarmnode.serving.session.session_streams import InputCursor, ids_in, ids_input, output_of
from tests.serving.drafting import Oracle, Steady


def job(start: int, count: int, guessed: int = 0, turn: int = 0, **more: object) -> Job:
    part = ids_input(range(start, start + count))
    made = Job(1, start, count, (part,), ForwardHidden(CodecSchedule(Codec.NONE)), lambda *_: None, 0.0)
    return replace(made, guessed=guessed, turn=turn, **more)  # type: ignore[arg-type]


# -- inputs


def test_guesses_are_taken_back_in_a_newer_turn_and_never_what_is_sure() -> None:
    cursor = InputCursor(received_end=0)
    cursor.advance(5)
    assert cursor.sure == 5
    cursor.advance(9, guessed=3)
    assert (cursor.accepted, cursor.sure) == (9, 6)
    assert cursor.begin_turn(0, 7) is None, "no newer turn"
    assert cursor.begin_turn(2, 7) == 7 and cursor.accepted == 7
    assert cursor.begin_turn(3, 4) == 6, "positions below are of the text"
    assert (cursor.advance(8, guessed=0), cursor.pop_retraction(), cursor.pop_retraction()) == ((6, None), 6, None)
    assert cursor.begin_turn(4, 8) is None and cursor.turn == 4, "there is nothing to take back"
    cursor.advance(10, guessed=2)
    cursor.confirm(9)
    assert cursor.begin_turn(5, 8) == 9


def test_jobs_with_guesses_are_joined_cut_and_dropped() -> None:
    first, second = job(10, 3, guessed=2, guesses=(Guess(11, 1), Guess(12, 2))), job(13, 2, guessed=3, turn=1)
    second = replace(second, guesses=(Guess(13, 3), Guess(14, 4)))
    joined = merge(first, second)
    assert joined is not None and (joined.guessed, joined.turn, joined.first_guessed) == (3, 1, 12)
    assert [guess.id for guess in joined.guesses] == [1, 2, 3, 4]
    front, rest = cut(joined, 2)
    assert rest is not None and (front.guessed, rest.guessed) == (0, 3)
    assert [guess.position for guess in front.guesses] == [11] and len(rest.guesses) == 3
    assert merge(first, replace(second, back_to=13)) is None, "what is taken back in between would stay"
    waiting = deque([first, second])
    assert drop_from(waiting, 12) == 3 and [(one.start, one.count, one.guessed) for one in waiting] == [(10, 2, 1)]
    assert drop_from(waiting, 10) == 2 and not waiting


def test_whatever_is_dropped_every_position_comes_from_the_latest_turn() -> None:
    chance = random.Random(5)
    for _ in range(200):
        jobs, end, turn, owner = deque[Job](), 0, 0, dict[int, int]()
        for _ in range(30):
            back = chance.randrange(max(0, end - 6), end + 1)
            if back < end:
                turn, end = turn + 1, back
                drop_from(jobs, back)
            count = chance.randrange(1, 6)
            jobs.append(job(end, count, turn=turn, back_to=back))
            owner.update(dict.fromkeys(range(end, end + count), turn))
            end += count
        came = dict[int, int]()
        while jobs:
            one = next_job(jobs, chance.randrange(1, 9))
            came.update(dict.fromkeys(range(one.start, one.end), one.turn))
        assert came == {position: turn for position, turn in owner.items() if position < end}


def test_entries_say_how_many_of_their_positions_are_guesses() -> None:
    infos = [(TensorInfo(Codec.NONE, DType.FLOAT32, (1, 1, 1)), bytes(4))] * 4
    told = [(entry.start, entry.body.guessed, entry.body.turn) for entry in entries_of(job(7, 4, 3, turn=9), infos)]
    assert told == [(7, 0, 9), (8, 1, 9), (9, 2, 9), (10, 3, 9)]


def test_entries_are_cut_at_a_position() -> None:
    info, payload = ids_input([1, 2, 3])
    entries = [Entry(0, 3, Input(info, want=Want.NOTHING), (payload,)), Entry(3, 3, Input(info), (payload,))]
    ((first, second),) = [tuple(until(entries, 4))]
    assert first is entries[0] and second.count == 1 and ids_in(second.body.tensor, second.payload[0]) == [1]
    assert list(until(entries, 3)) == entries[:1] and list(until(entries, 9)) == entries


@pytest.mark.parametrize(
    ("cuts", "turn", "limit"),
    [([], 0, None), ([(1, 9)], 0, 9), ([(1, 9)], 1, None), ([(1, 9), (2, 12)], 0, 9), ([(1, 9), (2, 7)], 0, 7)],
)
def test_what_was_computed_for_an_earlier_turn_counts_up_to_the_lowest_cut(
    cuts: list[tuple[int, int]], turn: int, limit: int | None
) -> None:
    taken_back = Retractions()
    for one in cuts:
        taken_back.record(*one)
    assert taken_back.limit(turn) == limit


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [1, 1 << 60]])
def test_what_is_no_token_id_is_not_read(ids: list[int]) -> None:
    info, payload = ids_input(ids)
    assert ids_in(info, payload) is None
    assert ids_in(info, payload[:-1]) is None and ids_in(*ids_input([7, (1 << 31) - 1])) == [7, (1 << 31) - 1]


# -- the first hop


def test_guesses_in_flight_are_bounded_and_judged_in_their_order() -> None:
    text, budget, counts = [*range(10, 60)], Steady(4), Counter[tuple[str, str]]()
    lead = DraftLead(Oracle(text), budget, most=3, begin=0, clock=lambda: 1.0, counts=[counts])

    def proposed(limit: int) -> list[int]:
        return [guess.id for guess in lead.propose(limit)]

    lead.know(text[:5])
    assert proposed(100) == [], "nothing has come round the ring"
    lead.record_token(5)
    assert proposed(100) == text[5:8] and proposed(100) == [], "three are in flight"
    assert lead.judge(text[5]) and lead.judge(text[6]) and lead.end == 7
    assert proposed(9) == [text[8]], "the text ends at position 9"
    assert not lead.judge(99) and lead.in_flight == 0
    assert (budget.accepted, budget.rejected) == (2, 2)
    assert counts == {("oracle", "accepted"): 2, ("oracle", "wasted"): 2}
    lead.cut(3)
    assert lead.end == 3
    lead.pause()
    assert proposed(100) == []


class Eager(Oracle):
    """Proposes more tokens than it was asked for."""

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        return [7] * (count + 40)


def test_of_too_many_guesses_the_first_ones_are_sent() -> None:
    lead = DraftLead(Eager([1, 2]), Steady(4), most=3, begin=0, clock=lambda: 1.0, counts=[])
    lead.know([1, 2])
    lead.record_token(2)
    assert [guess.id for guess in lead.propose(100)] == [7] * 3 and lead.propose(100) == []


def test_the_time_of_a_turn_is_that_of_the_position_before_the_token() -> None:
    now_s, budget = [0.0], Steady(4)
    lead = DraftLead(Oracle([]), budget, most=4, begin=0, clock=lambda: now_s[0], counts=[])
    lead.sent(10, 13)
    now_s[0] = 0.5
    lead.record_token(11)
    now_s[0] = 0.7
    lead.sent(13, 14)
    lead.record_token(14)
    lead.record_token(14)
    assert budget.turns_s == [0.5, 0.0]


# -- the last hop


def test_a_job_waits_for_the_ids_of_its_turn() -> None:
    done: list[Job] = []
    jobs = GuessedJobs(done.append)
    jobs.put(job(0, 5))
    jobs.put(job(5, 3, guessed=2, turn=1))
    jobs.put(job(8, 1, guessed=0, turn=1))
    assert [one.start for one in done] == [0]
    jobs.accept(6, Drafts((1, 2), 0))
    assert len(done) == 1, "of another turn"
    jobs.accept(6, Drafts((3,), 1))
    jobs.accept(7, Drafts((4,), 1))
    assert [one.guesses for one in done[1:]] == [(Guess(6, 3), Guess(7, 4)), ()]
    jobs.put(job(9, 2, guessed=2, turn=1))
    jobs.put(job(9, 1, turn=2, back_to=9))
    assert [(one.start, one.turn) for one in done[3:]] == [(9, 2)], "what waited was taken back"
    for start in range(100, 1000):
        jobs.accept(start, Drafts((1,), 2))
    assert len(jobs._guesses) <= 32


def drawn_by(sampler: Sampler, first: int, tokens: Sequence[int], guesses: dict[int, int]) -> list[Drawn]:
    """Draw after guesses that the look-up made at even positions, and the model at odd ones."""
    made = [Guess(at, token, ProposerKind.MODEL if at % 2 else ProposerKind.LOOKUP) for at, token in guesses.items()]

    def draw(position: int) -> Drawn:
        return Drawn(position, (tokens[position - first],), sampler.is_final(position, tokens[position - first]))

    return list(sampler.drawn_after(made, first, draw, len(tokens)))


def test_nothing_is_drawn_after_a_wrong_guess_until_a_sure_input() -> None:
    sampler = Sampler(Sampling(5, 100, stop_ids=(99,)), 100)
    first = drawn_by(sampler, 5, [10, 11, 12, 13], {5: 10, 6: 77, 7: 12})
    assert [(one.position, one.guess, one.wasted) for one in first] == [
        (5, None, ()),
        (6, Guess(5, 10, ProposerKind.MODEL), ()),
    ]
    assert drawn_by(sampler, 9, [14], {8: 13}) == [], "its predecessor was wrong"
    again = drawn_by(sampler, 7, [20, 21], {7: 20})
    assert [(one.ids[0], one.guess is not None, one.wasted) for one in again] == [
        (20, False, (0, 2, 0, 1)),
        (21, True, ()),
    ]
    assert [dict(drafts_in(output_of(one))) for one in again] == [
        {("lookup", "wasted"): 2, ("model", "wasted"): 1},
        {("model", "accepted"): 1},
    ]
    assert [one.final for one in drawn_by(sampler, 9, [99, 1], {8: 21, 9: 99})] == [True], "the text has ended"
