"""Format numbers for people, and count tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return `number` with its noun, in the plural unless it is 1: "0 machines", "1 machine", "2,000 addresses"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def runs(numbers: Iterable[int]) -> list[range]:
    """Return numbers as the fewest ranges of numbers that follow one another, sorted; empty for no numbers."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as ranges in text: `["1", "3-5"]` for 1, 3, 4, 5."""
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs(numbers)]


def layers(start: int, end: int) -> str:
    """Return the layers from `start` to before `end` in words: "layers 0 to 15", "layer 3", "no layers"."""
    if end - start < 2:
        return f"layer {start}" if end > start else "no layers"
    return f"layers {start} to {end - 1}"


def format_bytes(count: float) -> str:
    """Return `count` bytes with a unit of a power of 1000: "5.1 GB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    index = 0
    while count >= 1000 and index < len(units) - 1:
        count, index = count / 1000, index + 1
    return f"{count:.0f} {units[index]}" if index < 2 else f"{count:.1f} {units[index]}"


def common_beginning(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that two texts have in common."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
