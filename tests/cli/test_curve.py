"""The loss curve is drawn where its values are."""

from __future__ import annotations

import math

from swarmnode.terminal.training_view import draw_curve


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(column, row from the top) of all dots."""
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    found = set()
    for high, line in enumerate(lines):
        for wide, character in enumerate(line):
            if 0x2800 <= ord(character) < 0x2900:
                found |= {
                    (2 * wide + x, 4 * high + y)
                    for x in range(2)
                    for y in range(4)
                    if ord(character) - 0x2800 & bits[x][y]
                }
    left = min((x for x, _ in found), default=0)
    return {(x - left, y) for x, y in found}


def test_a_falling_line_falls_over_the_whole_picture() -> None:
    lines = draw_curve([(number, 39.0 - number) for number in range(40)], 40, width=24, height=5)
    assert len(lines) == 5
    assert {len(line) for line in lines} == {24}
    assert lines[0].lstrip().startswith("39 ")
    assert lines[-1].lstrip().startswith("0 ")
    drawn = dots(lines)
    assert (0, 0) in drawn
    assert max(y for _, y in drawn) == 19
    heights = [min(y for x, y in drawn if x == column) for column in range(max(x for x, _ in drawn) + 1)]
    assert heights == sorted(heights), "no column is empty, and none is higher than the one before"


def test_what_is_yet_to_come_stays_empty() -> None:
    drawn = dots(draw_curve([(number, float(number % 3)) for number in range(25)], 100, width=60, height=4))
    assert max(x for x, _ in drawn) < 60 * 2 / 4


def test_few_points_are_joined() -> None:
    drawn = dots(draw_curve([(0, 1.0), (9, 0.0)], 10, width=30, height=6))
    columns = {x for x, _ in drawn}
    assert columns == set(range(max(columns) + 1))


def test_nothing_one_and_no_number() -> None:
    assert draw_curve([], 10, width=8, height=2) == [" " + chr(0x2800) * 7] * 2
    assert len(dots(draw_curve([(3, 2.5)], 10, width=20, height=3))) == 1
    assert len(dots(draw_curve([(3, 2.5), (4, math.nan), (5, math.inf)], 10, width=20, height=3))) == 1


def test_many_points_in_one_column_are_their_mean() -> None:
    points = [(number, 2.0 * (number % 2)) for number in range(1000)]
    lines = draw_curve([*points, *((number, 9.0) for number in range(1000, 2000))], 2000, width=20, height=4)
    assert lines[-1].startswith("0 "), "the scale is that of the values"
    drawn = dots(lines)
    left = {y for x, y in drawn if x < 8}
    assert left == {15}, "their mean, not a band"
    assert {y for x, y in drawn if x > 24} == {0}
