"""Numbers of things, as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """0 machines, 1 machine, 2,000 machines."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
