"""Sampler: what draws the tokens of one session, at its last hop.

Of a card's logits mostly the largest few come to the host. All of them do where something is to be done to them before a token is
drawn, or told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from swarmnode.codec.logprobs import TokenLogprob, pack_logprobs
from swarmnode.codec.sampling import Sampling, unpack_text
from swarmnode.compress.codecs import Buffer
from swarmnode.compute.serving.device_outputs import DeviceOutputs
from swarmnode.compute.serving.penalties import adjust
from swarmnode.compute.serving.sampling import Candidates, candidates, sample, sample_candidates
from swarmnode.compute.serving.token_history import TokenHistory

if TYPE_CHECKING:
    from swarmnode.compute.serving.grammar import GrammarMatcher  # brings llguidance along


class Drawn(NamedTuple):
    """The tokens at a position, one for each row; `final` where nothing follows. `logprobs` as they travel, where wanted."""

    position: int
    ids: tuple[int, ...]
    final: bool
    logprobs: bytes = b""


Draw = Callable[[Sequence[Tensor]], tuple[Drawn, ...]]
"""From what was fetched to the tokens, on the host"""


class Sampler:
    """Of a session of at most so many positions, whose text follows the `grammar`. Where tokens count, it must be told of those
    that are not drawn here."""

    def __init__(self, parameters: Sampling, max_length: int, grammar: GrammarMatcher | None = None) -> None:
        self._parameters = parameters
        self._grammar = grammar
        counts = parameters.counts_tokens
        self._history = TokenHistory(parameters.prompt_length, max_length) if counts else None
        self._needs_all = counts or parameters.logprobs is not None or bool(parameters.logit_bias)

    def __repr__(self) -> str:
        return f"<Sampler by {self._parameters!r}>"

    def tell(self, text: Buffer) -> None:
        """What came with an OPEN: the ids of the prompt, where they count, then of the tokens that were drawn elsewhere."""
        if self._history is not None:
            start = 0 if self._parameters.counts_prompt else self._parameters.prompt_length
            self._history.set(start, unpack_text(text))

    def first(self, known: int) -> int:
        """The first position for which a token is to be drawn, where outputs for those below `known` are there already."""
        return max(self._parameters.prompt_length, known)

    def is_final(self, position: int, token: int) -> bool:
        """Whether nothing follows this token."""
        parameters = self._parameters
        end = parameters.prompt_length + parameters.max_new_tokens
        if position + 1 >= end or token in parameters.stop_ids:
            return True
        if self._grammar is None or self._history is None:
            return False
        return self._grammar.ends(self._history.drawn(position + 1).tolist())

    def launch(self, logits_BKV: Tensor, first: int, outputs: DeviceOutputs) -> Draw:
        """What draws, from what was fetched, the tokens at K positions from `first` on."""
        if self._needs_all:
            place = outputs.add(logits_BKV)
            return lambda fetched: tuple(self._draw_in_order(fetched[place], first))
        draws = [_launch(logits_BKV[:, k], self._parameters, first + k, outputs) for k in range(logits_BKV.shape[1])]
        return lambda fetched: tuple(
            self._drawn(position, draw(fetched).tolist()) for position, draw in enumerate(draws, first)
        )

    def _drawn(self, position: int, ids: Sequence[int], logprobs: bytes = b"") -> Drawn:
        return Drawn(position, tuple(ids), self.is_final(position, ids[0]), logprobs)

    def _draw_in_order(self, logits_BKV: Tensor, first: int) -> Iterator[Drawn]:
        """Each may depend on the one before. Only sessions of one row are drawn for."""
        for position, logits_V in enumerate(logits_BKV[0].float(), first):
            adjusted_V = logits_V.clone()
            adjust(adjusted_V, self._parameters, self._history, position)
            if self._grammar is not None and self._history is not None:
                allowed_V = self._grammar.allowed(self._history.drawn(position).tolist())
                adjusted_V.masked_fill_(~allowed_V, -torch.inf)
            token = int(sample(adjusted_V[None], self._parameters, position))
            if self._history is not None:
                self._history.set(position, [token])
            yield self._drawn(position, [token], self._logprobs(logits_V, token))

    def _logprobs(self, logits_V: Tensor, token: int) -> bytes:
        count = self._parameters.logprobs
        if count is None:
            return b""
        logprobs_V = logits_V.log_softmax(0)
        values_C, ids_C = logprobs_V.topk(min(count, len(logprobs_V)))
        told = [(token, float(logprobs_V[token])), *zip(ids_C.tolist(), values_C.tolist(), strict=True)]
        return pack_logprobs(TokenLogprob(*one) for one in told)


def _launch(
    logits_BV: Tensor, parameters: Sampling, position: int, outputs: DeviceOutputs
) -> Callable[[Sequence[Tensor]], Tensor]:
    """What draws ids_B from what was fetched. Of a card's logits only the largest are; all of them where these are too few."""
    if parameters.temperature <= 0:
        place = outputs.add(logits_BV.argmax(dim=-1))
        return lambda fetched: fetched[place]
    if logits_BV.device.type != "cuda":  # the host has them already, or the device may lack float64
        place = outputs.add(logits_BV)
        return lambda fetched: sample(fetched[place], parameters, position)
    places = [outputs.add(part) for part in candidates(logits_BV, parameters)]

    def draw(fetched: Sequence[Tensor]) -> Tensor:
        known = Candidates(*(fetched[place] for place in places))
        ids_B = sample_candidates(known, logits_BV.shape[1], parameters, position)
        return sample(logits_BV, parameters, position) if ids_B is None else ids_B

    return draw
