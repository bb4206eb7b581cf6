"""Which positions go through the model next: nobody starves, nobody stalls for long."""

from __future__ import annotations

import random
from collections import Counter
from statistics import median

import pytest

from swarmnode.plan.serving.scheduler import STALL, PassScheduler
from tests.plan.serving.stage import FIXED_S, LONGEST_CHUNK, LONGEST_STEP, Stage, cost_s


def test_steps_go_together_and_short_prompts_go_together() -> None:
    stage = Stage()
    stage.decode()
    for session in range(20):
        stage.scheduler.add(session, 16)
    assert [len(counts) for counts in stage.run()] == [8, 8, 4]
    for session in range(30):
        stage.scheduler.add(session, 1)
    assert stage.turn() == dict.fromkeys(range(30), 1)


def test_a_long_prompt_keeps_nobody_from_the_shorter_ones() -> None:
    stage = Stage()
    stage.decode()
    stage.scheduler.add(0, 10_000)
    for session in range(1, 5):
        stage.scheduler.add(session, 20)
    stage.turn()
    assert set(stage.turn()) >= {1, 2, 3, 4}


@pytest.mark.parametrize("position_s", [1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("decoding", [1, 2, 5, 30])
@pytest.mark.parametrize("known", [20, 1000])
def test_who_decodes_waits_for_no_more_than_a_stall_and_a_step(position_s: float, decoding: int, known: int) -> None:
    """Whatever a position costs beside a pass. After 1,000 steps, passes of several positions are forgotten."""
    stage = Stage(position_s)
    stage.decode(*range(decoding), turns=known)
    step_s = cost_s(dict.fromkeys(range(decoding), 1), position_s)
    stage.scheduler.add(100, 100_000)
    last_s, waits_s, chunks = stage.now_s, [], []
    for _ in range(400):
        counts = stage.turn()
        if 0 in counts:
            waits_s.append(stage.now_s - last_s)
            last_s = stage.now_s
        else:
            chunks.append(sum(counts.values()))
    assert max(waits_s) < ((STALL + 1) * step_s + position_s / 2) * 1.01
    # No chunk is much shorter than it may be, either.
    fit = min((STALL * step_s - FIXED_S) / position_s, LONGEST_CHUNK)
    assert median(chunks) >= min(0.6 * fit, 0.9 * LONGEST_CHUNK)


def test_a_prompt_whose_positions_become_dearer_goes_in_shorter_chunks() -> None:
    """Attention to many columns takes time: a position behind 1,000 others costs five times what the first one does."""
    stage, past = Stage(), 0
    stage.decode(0)
    step_s, position_cost_s = cost_s({0: 1}), stage.cost_s
    stage.cost_s = lambda counts: position_cost_s(counts) * (1 if 0 in counts else 1 + past / 250)
    stage.scheduler.add(7, 1000)
    lengths, waits_s, last_s = [], [], stage.now_s
    while past < 1000:
        counts = stage.turn()
        past += counts.get(7, 0)
        if 0 in counts:
            waits_s.append(stage.now_s - last_s)
            last_s = stage.now_s
        else:
            lengths.append(counts[7])
    assert lengths[0] > lengths[-2]
    assert sorted(waits_s)[int(0.99 * len(waits_s))] < 1.1 * max((STALL + 1) * step_s, step_s + 5 * cost_s({7: 1}))


def test_steps_that_cost_more_than_chunks_do_not_lengthen_a_chunk_without_bound() -> None:
    """Only steps have logits, which take most of the time where the vocabulary is large."""
    stage = Stage()
    cost_of_prompt_s = stage.cost_s
    stage.cost_s = lambda counts: cost_of_prompt_s(counts) + (0.1 if 0 in counts else 0.0)
    stage.decode(0)
    step_s = stage.cost_s({0: 1})
    stage.scheduler.add(7, 20_000)
    for _ in range(60):
        stage.turn()
    chunks_s = [stage.cost_s(counts) for counts in stage.passes if 7 in counts]
    assert max(chunks_s[1:]) < STALL * step_s * 1.01 and min(chunks_s[10:]) > 0.9 * STALL * step_s


def test_a_prompt_goes_on_however_many_decode() -> None:
    stage = Stage()
    stage.decode(0)
    stage.scheduler.add(7, 1000)
    for _ in range(40):
        stage.turn()
    assert sum(7 in counts for counts in stage.passes) == 20
    assert min(counts[7] for counts in stage.passes if 7 in counts) >= 6


@pytest.mark.parametrize(("position_s", "chunks"), [(1e-3, [128, 128, 44]), (1e-4, [300])])
def test_alone_a_prompt_goes_in_longer_chunks_where_positions_cost_little(position_s: float, chunks: list[int]) -> None:
    stage = Stage(position_s=position_s)
    stage.decode()
    stage.scheduler.add(7, 300)
    assert [counts[7] for counts in stage.run()] == chunks


def test_no_chunk_is_longer_than_the_bound() -> None:
    stage = Stage(position_s=0.0)
    stage.decode()
    stage.scheduler.add(7, 2 * LONGEST_CHUNK + 1)
    assert [counts[7] for counts in stage.run()] == [LONGEST_CHUNK, LONGEST_CHUNK, 1]


def test_a_prompt_is_cut_for_the_stages_that_follow() -> None:
    def total_s(length: int, chunks: int, stages: int) -> float:
        return (chunks + stages - 1) * cost_s({0: length // chunks})

    stage = Stage()
    stage.decode()
    stage.scheduler.add(7, 256, stages_after=1)
    lengths = [counts[7] for counts in stage.run()]
    assert sum(lengths) == 256
    best_s = min(total_s(256, chunks, 2) for chunks in range(1, 17))
    assert total_s(256, len(lengths), 2) < 1.02 * best_s
    assert max(lengths) - min(lengths) < len(lengths)  # about as long each


def test_the_end_of_a_prompt_does_not_lengthen_everybodys_step() -> None:
    stage = Stage()
    stage.decode(*range(30))
    stage.scheduler.add(99, LONGEST_STEP)
    assert stage.turn() == {99: LONGEST_STEP}
    assert stage.turn() == dict.fromkeys(range(30), 1)


def test_a_few_drafts_share_a_step_that_is_cheap_to_fill_up() -> None:
    stage = Stage()
    stage.decode()
    stage.scheduler.add(0, 1)
    stage.scheduler.add(1, 3)
    assert stage.turn() == {0: 1, 1: 3}


def test_what_could_not_be_taken_waits_on() -> None:
    scheduler = PassScheduler(longest_step=LONGEST_STEP, longest_chunk=LONGEST_CHUNK)
    scheduler.add(0, 50)
    assert scheduler.next() == {0: 50}
    scheduler.took({0: 20})
    assert scheduler.next() == {0: 30}
    scheduler.drop(0)
    assert scheduler.next() == {}


def test_sixty_four_at_once_see_their_tokens_come_evenly() -> None:
    """The longest of a hundred waits is at most three times the usual one, while prompts of all lengths come in."""
    chance, stage = random.Random(4), Stage()
    stage.decode()
    left = dict.fromkeys(range(64), 64)
    for session in left:
        stage.scheduler.add(session, chance.randrange(2, 200))
    told_s: dict[int, float] = {}
    waits_s: list[float] = []
    while left:
        counts = stage.turn()
        for session in counts:
            if session in stage.scheduler._backlogs:
                continue  # in the middle of its prompt
            if session in told_s:
                waits_s.append(stage.now_s - told_s[session])
            told_s[session] = stage.now_s
            left[session] -= 1
            if left[session]:
                stage.scheduler.add(session, 1)
            else:
                del left[session]
                stage.scheduler.drop(session)
    waits_s.sort()
    assert waits_s[int(0.99 * len(waits_s))] <= 3 * median(waits_s)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_comes_something_goes_on(seed: int) -> None:
    """Also where passes were seen to cost nothing, or longer ones less than short ones."""
    dice = random.Random(seed)
    scheduler, waiting, owned = (
        PassScheduler(longest_step=LONGEST_STEP, longest_chunk=LONGEST_CHUNK),
        Counter[int](),
        set[int](),
    )
    for _ in range(200):
        match dice.choices(("add", "drop", "pass"), (10, 1, 10))[0]:
            case "add":
                session, positions = dice.randrange(8), dice.choice((1, 1, 1, 1, 2, 8, 9, 64, 300))
                if session not in owned and dice.random() < 0.7:
                    scheduler.open(session, dice.choice("abc"))
                    owned.add(session)
                scheduler.add(session, positions, stages_after=dice.randrange(3))
                waiting[session] += positions
            case "drop" if waiting:
                session = dice.choice(list(waiting))
                scheduler.drop(session)
                owned.discard(session)
                del waiting[session]
            case "pass" if waiting:
                said = scheduler.next()
                assert said and all(0 < count <= waiting[session] for session, count in said.items())
                counts = {
                    session: min(waiting[session], dice.choice((count, count + 1))) for session, count in said.items()
                }
                scheduler.took(counts)
                waiting -= Counter(counts)
                scheduler.ran(len(counts) * max(counts.values()), dice.choice((0.0, dice.random())))
