"""Numbers of experts that texts and guesses choose, of passes that are looked at now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EVERY = 32  # passes with guesses for one that is looked at: reading the choices waits for the device
CALLED = "experts"  # transformers' name of the module that gets states_NH, the chosen experts_NK and their weights_NK


class ExpertCounts:
    """Numbers of experts, summed over layers and the passes that were looked at.

    Attributes:
        text: Experts that positions of the text chose.
        guesses: Further experts that guesses chose.
    """

    def __init__(self, stack: nn.Module) -> None:
        self._mixtures = [one for name, one in stack.named_modules() if name.rpartition(".")[2] == CALLED]
        self._passes = 0  # with guesses
        self._chosen: list[Tensor] = []  # in the present pass
        self.text = 0
        self.guesses = 0

    def is_due(self) -> bool:
        """Note a pass with guesses, and return whether to look at it: the first one, and then every `EVERY`-th."""
        self._passes += 1
        return bool(self._mixtures) and self._passes % EVERY == 1

    @contextlib.contextmanager
    def looking(self, sure_N: Tensor, guessed_N: Tensor) -> Iterator[None]:
        """Count the experts of the pass in this context. Its rows times positions are N: `sure_N` has those of texts, `guessed_N`
        the guesses, and the others stand in."""
        hooks = [one.register_forward_pre_hook(self._note) for one in self._mixtures]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            chosen, self._chosen = self._chosen, []
        for experts_NK in chosen:
            if len(experts_NK) == len(sure_N):
                text = len(experts_NK[sure_N.to(experts_NK.device)].unique())
                self.text += text
                self.guesses += len(experts_NK[(sure_N | guessed_N).to(experts_NK.device)].unique()) - text

    def note(self, chosen: Sequence[Tensor]) -> None:
        """Note the experts_NK that a graph's pass chose."""
        self._chosen += chosen

    def _note(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(inputs) > 1 and isinstance(inputs[1], Tensor) and not inputs[1].is_floating_point():
            self._chosen.append(inputs[1].detach().view(len(inputs[1]), -1))


def position_masks(rows: int, count: int, guessed: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return which of `rows` rows times `longest` positions are sure, and which are guesses: of the first `count` positions of
    each row the last `guessed` ones are."""
    positions = torch.arange(longest)
    sure, filled = positions < count - guessed, positions < count
    return sure.repeat(rows), (filled & ~sure).repeat(rows)
