"""The look-up drafter: it finds the longest match, follows edited copies, and forgets what is cut off."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from swarmnode.serving.drafting.lookup import GRAM, MAX_MATCH, MAX_TRIED, TOKEN_BYTES, LookupDrafter


def turns_of(drafter: LookupDrafter, answer: Sequence[int], count: int) -> int:
    """Return the turns that `answer` takes with `count` drafts each, and give it to the drafter."""
    done = turns = 0
    while done < len(answer):
        proposed = drafter.propose((), count)
        assert len(proposed) <= count
        right = 0
        while right < min(len(proposed), len(answer) - done - 1) and proposed[right] == answer[done + right]:
            right += 1
        drafter.push(answer[done : done + right + 1])
        done, turns = done + right + 1, turns + 1
    return turns


def words(count: int, seed: int, vocabulary: int = 1000) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(count)]


def longest_match(text: Sequence[int]) -> int:
    """Return the length of the longest suffix that stands in `text` before its end, by comparing all places."""
    best = 0
    for place in range(1, len(text)):
        length = 0
        while length < min(place, MAX_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def test_a_copy_takes_a_turn_for_each_batch_of_drafts() -> None:
    drafter, prompt = LookupDrafter(), words(400, 1)
    drafter.push(prompt)
    assert turns_of(drafter, prompt, 7) <= 400 / 8 + 3


def test_the_longest_match_is_found() -> None:
    chance = random.Random(3)
    for _ in range(40):
        text = [chance.randrange(6) for _ in range(60)]
        drafter = LookupDrafter()
        drafter.push([*text, 999])  # as a prompt; the last tokens follow one by one
        drafter.cut(len(text))
        match = drafter._find(())
        places = sum(tuple(text[at - GRAM : at]) == tuple(text[-GRAM:]) for at in range(GRAM, len(text)))
        if places <= MAX_TRIED and longest_match(text) >= GRAM:
            assert match is not None
            assert match.length == longest_match(text)


def test_an_edit_costs_a_turn_and_the_same_edit_none() -> None:
    prompt = words(300, 2)
    for place in (50, 150, 250):
        prompt[place : place + 2] = [7001, 7002]
    answer = [token for token in prompt if token != 7002]
    answer = [8001 if token == 7001 else token for token in answer]
    drafter = LookupDrafter()
    drafter.push(prompt)
    plain = LookupDrafter()
    plain.push(prompt)
    copied = turns_of(plain, prompt, 9)
    first = turns_of(drafter, answer[:100], 9) - 10
    assert 1 <= first <= 5
    assert turns_of(drafter, answer[100:], 9) <= 20 + 3
    assert copied <= 33


def test_a_replaced_token_is_followed_at_once() -> None:
    prompt = words(200, 5)
    drafter = LookupDrafter()
    drafter.push(prompt)
    drafter.push(prompt[:100])
    drafter.push([5555])
    assert drafter.propose((), 1) == [prompt[101]]


def test_a_loop_is_proposed_beyond_the_end_of_the_text() -> None:
    drafter = LookupDrafter()
    drafter.push([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert drafter.propose((), 7) == [1, 2, 3, 1, 2, 3, 1]


def test_guesses_in_flight_are_continued() -> None:
    drafter, prompt = LookupDrafter(), words(200, 6)
    drafter.push(prompt)
    drafter.push(prompt[:20])
    proposed = drafter.propose((), 12)
    assert proposed == prompt[20:32]
    assert drafter.propose(proposed[:5], 7) == proposed[5:]
    assert drafter.propose([*prompt[60:64]], 3) == prompt[64:67]  # another drafter's guesses


def test_unlikely_matches_are_no_longer_proposed() -> None:
    drafter = LookupDrafter()
    drafter.push(words(2000, 7, vocabulary=12))
    answer = words(400, 8, vocabulary=12)
    turns_of(drafter, answer[:200], 4)
    proposed = 0
    for token in answer[200:]:
        proposed += len(drafter.propose((), 16))
        drafter.push([token])
    assert proposed < 200  # of 3200 that were asked for


def test_what_is_cut_off_is_forgotten() -> None:
    text = words(300, 9, vocabulary=20)
    drafter, fresh = LookupDrafter(), LookupDrafter()
    drafter.push(text)
    turns_of(drafter, words(150, 10, vocabulary=20), 4)
    drafter.cut(200)
    fresh.push(text[:200])
    assert (drafter._text, drafter._before, drafter._places) == (fresh._text, fresh._before, fresh._places)
    drafter.cut(0)
    assert drafter.propose((), 4) == []
    assert not drafter._places


def test_earlier_texts_are_proposed_and_kept() -> None:
    earlier = words(100, 11)
    drafter = LookupDrafter([earlier, [1, 2, 3]])
    drafter.push(earlier[20:25])
    assert drafter.propose((), 4) == earlier[25:29]
    drafter.cut(0)
    drafter.push(earlier[95:])
    assert drafter.propose((), 4) == []  # nothing is proposed across texts
    drafter.push(earlier[20:25])
    assert drafter.propose((), 4) == earlier[25:29]


def test_memory_is_bounded_and_counted() -> None:
    drafter = LookupDrafter(max_tokens=4000)
    for start in range(0, 20_000, 500):
        drafter.push(words(500, start, vocabulary=50_000))
        assert len(drafter._text) <= 4000
    held = sys.getsizeof(drafter._places) + 2 * sys.getsizeof(1 << 60) * len(drafter._places)
    held += sys.getsizeof(drafter._text) + sys.getsizeof(drafter._before)
    assert held <= max(drafter.size_bytes, 2000 * TOKEN_BYTES)
    drafter.cut(19_990)
    recent = words(500, 19_500, vocabulary=50_000)[:490]
    drafter.push(recent[100:105])
    assert drafter.propose((), 3) == recent[105:108]
    drafter.cut(10)  # long forgotten
    assert drafter.propose((), 3) == []
    assert len(drafter._text) == 0


def test_a_copy_is_found_by_its_first_token() -> None:
    prompt = words(300, 12, vocabulary=100_000)
    drafter = LookupDrafter()
    drafter.push(prompt)
    drafter.push([prompt[40]])
    assert drafter.propose((), 1) == [prompt[41]]
    drafter.push(prompt[41:44])
    drafter.push([prompt[100]])
    assert drafter.propose((), 3) != prompt[101:104], "later one token is too little, except near an edit"


def test_an_edit_in_single_bytes_is_learnt_once() -> None:
    """Short accidental matches inside the new word do not lead away from the copied text."""
    chance = random.Random(4)
    names = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(60)]
    names[5::12] = ["return"] * 5
    source = " ".join(names)
    copy = source.replace("return", "yield")
    drafter = LookupDrafter()
    drafter.push(list(source.encode()))
    learnt = copy.index("yield") + 9
    first = turns_of(drafter, list(copy[:learnt].encode()), 15)
    rest = turns_of(drafter, list(copy[learnt:].encode()), 15)
    assert first <= learnt / 16 + 11, "each byte of the new word, and the beginning"
    assert rest <= (len(copy) - learnt) / 16 + 3


def test_guesses_are_weighed() -> None:
    drafter, prompt = LookupDrafter(), words(200, 6)
    drafter.push(prompt)
    drafter.push(prompt[:20])
    weighed = drafter.weigh((), 12)
    assert [guess.id for guess in weighed] == drafter.propose((), 12) == prompt[20:32]
    likely = [guess.likely for guess in weighed]
    assert likely == sorted(likely, reverse=True) and 0.5 < likely[-1] < likely[0] <= 1.0
    assert drafter.weigh(prompt[20:24], 1)[0].likely == likely[4], "those in flight count"
