"""Sampler of a session, and the draw of a token.

The draw is a pure function of logits, parameters, row and position, so that a replay draws the same tokens.

The randomness is counter-based: a hash of (seed, row, position) gives the one uniform number of a draw; there is no state to
lose. Everything after the logits happens on the CPU in float32, so that every device draws the same from the same logits.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from swarmnode.codec.sampling import Sampling, TokenLogprob, pack_logprobs, unpack_text
from swarmnode.compress.codecs import Buffer
from swarmnode.compute.serving.device_transfers import DeviceOutputs

if TYPE_CHECKING:
    from swarmnode.compute.serving.grammar import GrammarMatcher  # imports llguidance

HEAD = 1024  # of the vocabulary, put in order first
ROWS_SEARCHED = 8  # at once: their logits are held in float64
UNKNOWN = -1


class TokenHistory:
    """Token ids of a session by position. Ids may be set in any order, and again: a position always has the same token."""

    def __init__(self, prompt_length: int, max_length: int) -> None:
        """Make an empty history. It has a place more than `max_length`: a session's last token lies behind its last position."""
        self._prompt_length = prompt_length
        self._ids_T = torch.full((max_length + 1,), UNKNOWN, dtype=torch.int32)

    def set(self, start: int, ids: Sequence[int]) -> None:
        """Set the tokens from position `start` on. Those beyond the history's end are dropped."""
        ids = ids[: max(0, len(self._ids_T) - start)]
        self._ids_T[start : start + len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def prompt(self) -> Tensor:
        """Return the known ids_N (int64) of the prompt."""
        return _known_ids(self._ids_T[: self._prompt_length])

    def drawn(self, position: int) -> Tensor:
        """Return the known ids_N (int64) that were drawn for the positions before `position`."""
        return _known_ids(self._ids_T[self._prompt_length : position])


def _known_ids(ids_T: Tensor) -> Tensor:
    return ids_T[ids_T != UNKNOWN].long()


def adjust(logits_V: Tensor, parameters: Sampling, history: TokenHistory | None, position: int) -> None:
    """Change logits_V (float32) in place, before the token at `position` is drawn from it.

    First the repetition penalty (CTRL, arXiv 1909.05858), then frequency and presence penalty (OpenAI's API), then the biases.
    """
    if history is not None:
        if (penalty := parameters.repetition_penalty) != 1:
            seen_N = torch.cat([history.prompt(), history.drawn(position)]).unique()
            values_N = logits_V[seen_N]
            logits_V[seen_N] = torch.where(values_N < 0, values_N * penalty, values_N / penalty)
        if parameters.frequency_penalty or parameters.presence_penalty:
            ids_N, counts_N = history.drawn(position).unique(return_counts=True)
            logits_V[ids_N] -= counts_N.float() * parameters.frequency_penalty + parameters.presence_penalty
    if parameters.logit_bias:
        ids, biases = zip(*parameters.logit_bias, strict=True)
        logits_V[torch.tensor(ids)] += torch.tensor(biases, dtype=torch.float32)


def sample(logits_BV: Tensor, parameters: Sampling, position: int, *, rows: Sequence[int] = ()) -> Tensor:
    """Draw ids_B (int64) for `position` of each row. `rows` are the rows' numbers in their session (default 0..B-1)."""
    if parameters.temperature <= 0:
        return logits_BV.argmax(dim=-1).cpu()
    logits_BV = logits_BV.to("cpu", torch.float32)
    numbers = rows or range(len(logits_BV))
    ids = [
        _draw(logits_V, parameters, uniform(parameters.seed, row, position))
        for row, logits_V in zip(numbers, logits_BV, strict=True)
    ]
    return torch.tensor(ids, dtype=torch.int64)


def uniform(seed: int, row: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, from the SHA-256 of the three values as little-endian 64-bit integers."""
    digest = hashlib.sha256(struct.pack("<QQQ", seed & 0xFFFFFFFFFFFFFFFF, row, position)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


class Candidates(NamedTuple):
    """Part of some rows' logits that most draws need: the largest values_BC (float32), in order, and their ids_BC.

    total_B (float64) is the logarithm of the sum of exponentials of all kept logits over the temperature.
    """

    values_BC: Tensor
    ids_BC: Tensor
    total_B: Tensor


def candidates(logits_BV: Tensor, top_k: int, temperature: float) -> Candidates:
    """Return the candidates of a draw with this `top_k` (0: all tokens) on the logits' device, without waiting for it.

    There is one candidate more than a draw uses, to show a tie at the edge.
    """
    kept, count = _counts(logits_BV.shape[1], top_k)
    values_BC, ids_BC = torch.topk(logits_BV.float(), min(count + 1, logits_BV.shape[1]))
    all_BV = values_BC[:, :count] if count == kept else logits_BV
    return Candidates(values_BC, ids_BC, (all_BV.double() / temperature).logsumexp(1))


def sample_candidates(shortlist: Candidates, vocabulary: int, parameters: Sampling, position: int) -> Tensor | None:
    """Draw ids_B as `sample` does, on the host; None if that needs all logits."""
    kept, count = _counts(vocabulary, parameters.top_k)
    ids = []
    for row, (values_C, ids_C, total) in enumerate(zip(*shortlist, strict=True)):
        if len(values_C) > count and values_C[count] == values_C[count - 1]:
            return None  # unknown which of the equal ones come first
        by_id = ids_C[:count].argsort()
        ordered_C, order = torch.sort(values_C[by_id], descending=True, stable=True)
        number = uniform(parameters.seed, row, position)
        token = _pick(ordered_C, ids_C[by_id][order], total, count == kept, parameters, number)
        if token is None:
            return None
        ids.append(token)
    return torch.tensor(ids, dtype=torch.int64)


def _counts(vocabulary: int, top_k: int) -> tuple[int, int]:
    """Return how many of the most likely tokens may be drawn, and how many of them to search first."""
    kept = min(top_k or vocabulary, vocabulary)
    return kept, kept if top_k else min(kept, HEAD)


def _draw(logits_V: Tensor, parameters: Sampling, number: float) -> int:
    """Return the token whose stretch of the cumulated probabilities, most likely first, holds `number`.

    The largest few logits nearly always hold it, so the whole vocabulary is sorted only if they do not.
    """
    kept, first = _counts(len(logits_V), parameters.top_k)
    token = _draw_among(first, kept, logits_V, parameters, number)
    if token is None:
        token = _draw_among(kept, kept, logits_V, parameters, number)
    assert token is not None  # all were looked at
    return token


def _draw_among(count: int, eligible: int, logits_V: Tensor, parameters: Sampling, number: float) -> int | None:
    """Return the token, searched for among the `count` most likely of the `eligible` ones; None if that needs more of them."""
    # The largest logits first, equal ones by id.
    ids_N = torch.arange(len(logits_V))
    if count < len(logits_V):
        ids_N = (logits_V >= torch.topk(logits_V, count).values[-1]).nonzero()[:, 0]
    ordered_N, order_N = torch.sort(logits_V[ids_N], descending=True, stable=True)
    ordered_C, ids_C = ordered_N[:count], ids_N[order_N][:count]
    scaled_C = ordered_C.double() / parameters.temperature
    total = scaled_C.logsumexp(0) if count == eligible else (logits_V.double() / parameters.temperature).logsumexp(0)
    return _pick(ordered_C, ids_C, total, count == eligible, parameters, number)


def _pick(
    ordered_C: Tensor, ids_C: Tensor, total: Tensor, are_all: bool, parameters: Sampling, number: float
) -> int | None:
    """Return the token whose share of the cumulated probability contains `number`, among the most likely tokens; None if it lies
    behind them."""
    likelihood_C = (ordered_C.double() / parameters.temperature - total).exp()
    cumulated_C = likelihood_C.cumsum(0)
    last = float(cumulated_C[-1]) if are_all else 1.0
    if parameters.top_p < 1 or parameters.min_p > 0:
        kept = _truncation(likelihood_C, cumulated_C, parameters)
        if kept > len(cumulated_C) and not are_all:
            return None
        cumulated_C = cumulated_C[:kept]
        last = float(cumulated_C[-1])
    index = int(torch.searchsorted(cumulated_C, number * last, right=True))
    if index >= len(cumulated_C) and not are_all:
        return None
    return int(ids_C[min(index, len(cumulated_C) - 1)])


def _truncation(likelihood_C: Tensor, cumulated_C: Tensor, parameters: Sampling) -> int:
    """Return how many of the most likely tokens are kept. A number above their count means that more may be kept.

    Kept is the smallest set that reaches top_p (nucleus sampling, arXiv 1904.09751), and of these the tokens at least min_p times
    as likely as the first (arXiv 2407.01082).
    """
    kept = len(likelihood_C) + 1
    if parameters.top_p < 1:
        kept = int((cumulated_C < parameters.top_p).sum()) + 1
    if parameters.min_p > 0:
        likely = int((likelihood_C >= parameters.min_p * likelihood_C[0]).sum())
        kept = min(kept, likely if likely < len(likelihood_C) else likely + 1)
    return kept


def may_draw(token: int, logits_V: Tensor, parameters: Sampling, position: int, *, spread: float) -> bool:
    """Return whether `token` may be drawn for `position` from logits within `spread` of logits_V, at a temperature above 0.

    Tokens stand in the order of their logits. So those that lie more than twice the spread above the token's come before it in any
    case, and those that lie more than that below it come after it. In between the order is open, and each likelihood may be off by
    the spread. Logits are changed by biases alone: penalties and grammars are not looked at.
    """
    logits_V = logits_V.float().clone()
    adjust(logits_V, parameters, None, position)
    count = _counts(len(logits_V), parameters.top_k)[0]
    edge = float(torch.topk(logits_V, count).values[-1]) if count < len(logits_V) else -math.inf
    likelihood_V = (logits_V.double() / parameters.temperature).softmax(0) * (logits_V >= edge)
    likelihood_V /= likelihood_V.sum()
    if parameters.top_p < 1 or parameters.min_p > 0:
        ordered_V, order_V = likelihood_V.sort(descending=True)
        kept = min(len(ordered_V), _truncation(ordered_V, ordered_V.cumsum(0), parameters))
        edge = max(edge, float(logits_V[order_V[kept - 1]]))
    own, wide = float(logits_V[token]), math.exp(2 * spread / parameters.temperature)
    if own < edge - 2 * spread:
        return False
    number = uniform(parameters.seed, 0, position)
    least, most = (float(likelihood_V[logits_V >= edge + side].sum()) for side in (2 * spread, -2 * spread))
    before = float(likelihood_V[logits_V > own + 2 * spread].sum())
    until = float(likelihood_V[logits_V >= own - 2 * spread].sum())
    return before / wide <= number * most * wide and number * least / wide <= until * wide


class Guess(NamedTuple):
    """Guessed token as the input at a position, and the number of its proposer (`codec.messages.ProposerKind`)."""

    position: int
    id: int
    proposer: int = 0


class Drawn(NamedTuple):
    """Tokens drawn at a position, one for each row. `final` says that nothing follows.

    `logprobs` is in its wire format; empty if not wanted. `guess` is the input before if that was a guess, which was right, else
    None. `wasted` counts the wrong guesses since the token before, by the number of their proposer. `forced` are the tokens that
    must follow by the grammar, and `guesses` those that may follow by the layer beside the head.
    """

    position: int
    ids: tuple[int, ...]
    final: bool
    logprobs: bytes = b""
    guess: Guess | None = None
    wasted: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    guesses: tuple[int, ...] = ()


Draw = Callable[[Sequence[Tensor]], tuple[Drawn, ...]]
"""Function from the fetched outputs to the drawn tokens, on the host"""


class Sampler:
    """Sampler of one session of at most `max_length` positions, whose text follows the `grammar`.

    If parameters count tokens, `tell` must give it the tokens that are not drawn here. With each token it names at most `foresees`
    tokens that must follow.
    """

    def __init__(
        self, parameters: Sampling, max_length: int, grammar: GrammarMatcher | None = None, *, foresees: int = 0
    ) -> None:
        self._parameters = parameters
        self._grammar = grammar
        self._foresees = foresees
        counts = parameters.counts_tokens
        self._history = TokenHistory(parameters.prompt_length, max_length) if counts else None
        self._needs_all = counts or parameters.logprobs is not None or bool(parameters.logit_bias)
        self._latest: tuple[int, int] | None = None  # position and id of the token drawn last, unless it was final
        self._wasted: Counter[int] = Counter()  # wrong guesses since then, by proposer

    @property
    def follows_grammar(self) -> bool:
        """Whether each token takes looking at all that may follow."""
        return self._grammar is not None

    def tell(self, text: Buffer) -> None:
        """Take the text of an OPEN: the ids of the prompt, if the parameters count them, then of the tokens drawn elsewhere."""
        if self._history is not None:
            start = 0 if self._parameters.counts_prompt else self._parameters.prompt_length
            self._history.set(start, unpack_text(text))

    def first(self, received_end: int) -> int:
        """Return the first position to draw a token for, if outputs for the positions below `received_end` exist already."""
        return max(self._parameters.prompt_length, received_end)

    def is_final(self, position: int, token: int) -> bool:
        """Return whether nothing follows `token`: it is the last one, a stop token, or the grammar's end."""
        parameters = self._parameters
        end = parameters.prompt_length + parameters.max_new_tokens
        if position + 1 >= end or token in parameters.stop_ids:
            return True
        if self._grammar is None or self._history is None:
            return False
        return self._grammar.ends(self._history.drawn(position + 1).tolist())

    def launch(
        self,
        logits_BKV: Tensor,
        first: int,
        outputs: DeviceOutputs,
        guesses: Sequence[Guess] = (),
    ) -> Draw:
        """Add the needed outputs, and return a function that draws the tokens at K positions from `first` on.

        `guesses` are the inputs that are only guesses. Nothing is drawn after a wrong one.
        """
        if self._needs_all:
            place = outputs.add(logits_BKV)
            return lambda fetched: tuple(
                self.drawn_after(
                    guesses, first, partial(self._draw_adjusted, fetched[place], first), logits_BKV.shape[1]
                )
            )
        draws = [_launch(logits_BKV[:, k], self._parameters, first + k, outputs) for k in range(logits_BKV.shape[1])]
        return lambda fetched: tuple(
            self.drawn_after(
                guesses,
                first,
                lambda position: self._drawn(position, draws[position - first](fetched).tolist()),
                len(draws),
            )
        )

    def drawn_after(
        self, guesses: Sequence[Guess], first: int, draw: Callable[[int], Drawn], count: int
    ) -> Iterator[Drawn]:
        """Yield the tokens that `draw` returns for `count` positions from `first` on, in order, as far as the inputs before them
        are of the text.

        The input at a position of `guesses` is of the text only if the token drawn last, at this position, is the same.
        """
        guessed = {guess.position: guess for guess in guesses}
        for position in range(first, first + count):
            guess = guessed.get(position - 1)
            if guess is not None and self._latest != (position - 1, guess.id):
                self._wasted[guess.proposer] += 1
                continue
            drawn = draw(position)
            wasted, self._wasted = (
                self._wasted,
                Counter(),
            )  # wrong guesses since the token before, by number of the proposer
            counts = tuple(wasted[proposer] for proposer in range(max(wasted, default=-1) + 1))
            drawn = drawn._replace(guess=guess, wasted=counts)
            self._latest = None if drawn.final else (position, drawn.ids[0])
            yield drawn

    def _drawn(self, position: int, ids: Sequence[int], logprobs: bytes = b"") -> Drawn:
        return Drawn(position, tuple(ids), self.is_final(position, ids[0]), logprobs)

    def _draw_adjusted(self, logits_BKV: Tensor, first: int, position: int) -> Drawn:
        """Draw the token at `position` after all earlier ones, on which it may depend. Only for sessions of one row."""
        logits_V = logits_BKV[0, position - first].float()
        adjusted_V = logits_V.clone()
        adjust(adjusted_V, self._parameters, self._history, position)
        if self._grammar is not None and self._history is not None:
            allowed_V = self._grammar.allowed(self._history.drawn(position).tolist())
            adjusted_V.masked_fill_(~allowed_V, -torch.inf)
        token = int(sample(adjusted_V[None], self._parameters, position))
        if self._history is not None:
            self._history.set(position, [token])
        drawn = self._drawn(position, [token], self._logprobs(logits_V, token))
        return drawn if drawn.final else drawn._replace(forced=self._forced(position + 1))

    def _forced(self, position: int) -> tuple[int, ...]:
        """Return the tokens that must stand at `position` and behind it."""
        if not self._foresees or self._grammar is None or self._history is None:
            return ()
        return tuple(self._grammar.forced(self._history.drawn(position).tolist())[: self._foresees])

    def _logprobs(self, logits_V: Tensor, token: int) -> bytes:
        count = self._parameters.logprobs
        if count is None:
            return b""
        logprobs_V = logits_V.log_softmax(0)
        values_C, ids_C = logprobs_V.topk(min(count, len(logprobs_V)))
        told = [(token, float(logprobs_V[token])), *zip(ids_C.tolist(), values_C.tolist(), strict=True)]
        return pack_logprobs(TokenLogprob(*one) for one in told)


def _likeliest(logits: Sequence[Tensor]) -> Sequence[Tensor]:
    return (torch.stack(list(logits)).argmax(dim=-1),)


@dataclass(frozen=True)
class _Search:
    """Search for the candidates of sessions whose settings for it are the same."""

    top_k: int
    temperature: float

    def __call__(self, logits: Sequence[Tensor]) -> Sequence[Tensor]:
        some = torch.cat(list(logits)).split(ROWS_SEARCHED)
        found = zip(*(candidates(logits_BV, self.top_k, self.temperature) for logits_BV in some), strict=True)
        return [torch.cat(parts).view(len(logits), -1, *parts[0].shape[1:]) for parts in found]


def _launch(
    logits_BV: Tensor, parameters: Sampling, position: int, outputs: DeviceOutputs
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that draws ids_B from the fetched outputs.

    A card sends only its largest logits; all of them are copied later if a draw needs more.
    """
    if parameters.temperature <= 0:
        likeliest = outputs.add_each(logits_BV, _likeliest)
        return lambda fetched: likeliest(fetched)[0]
    if logits_BV.device.type != "cuda":  # the host has them already, or the device may lack float64
        place = outputs.add(logits_BV)
        return lambda fetched: sample(fetched[place], parameters, position)
    found = outputs.add_each(logits_BV, _Search(parameters.top_k, parameters.temperature))

    def draw(fetched: Sequence[Tensor]) -> Tensor:
        known = Candidates(*found(fetched))
        ids_B = sample_candidates(known, logits_BV.shape[1], parameters, position)
        return sample(logits_BV, parameters, position) if ids_B is None else ids_B

    return draw
