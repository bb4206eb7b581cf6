"""The model that most swarms of the tests serve."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from swarmnode.demo import generate_alone
from tests.llama import save_llama

PROMPT = [5, 17, 3, 99, 42, 7, 256, 11]


@dataclass(frozen=True)
class TinyModel:
    """A small random Llama on disk, and what one process generates with it."""

    folder: Path
    units: int

    @classmethod
    def save(cls, folder: Path, layers: int = 4) -> TinyModel:
        save_llama(folder, layers=layers)
        return cls(folder, units=layers + 2)

    def alone(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        return list(_alone(self.folder, tuple(prompt), max_new_tokens))


@functools.lru_cache
def _alone(folder: Path, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    return generate_alone(folder, list(prompt), max_new_tokens)
