"""Generation in RING mode: options, result, and the stream of tokens. The swarm draws tokens without waiting for the
client."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypedDict

from swarmnode.codec.body import (
    MAX_POSITIONS,
    MAX_PROPOSER_CHARS,
    MAX_SEED,
    MAX_STOP_IDS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    HopSpec,
)
from swarmnode.codec.messages import DRAFT_SOURCES, LOOKUP, NO_DRAFTS, Mode, Output, ProposerKind, Want
from swarmnode.codec.sampling import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_GRAMMAR_CHARS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    Grammar,
    Sampling,
    TokenLogprob,
    unpack_logprobs,
)
from swarmnode.codec.tensors import AUTO, COMPRESSIONS, codec_named
from swarmnode.errors import UsageError
from swarmnode.links.hop import Entry
from swarmnode.measuring.meters import ACCEPTED, WASTED
from swarmnode.serving.client.client_session import ClientSession, SessionStats
from swarmnode.serving.client.prefix_cache import Beginnings, SharedText
from swarmnode.serving.client.session_spec import MAX_WIDTH, SessionSpec, ids_entry
from swarmnode.swarm.records.manifest import SERVING_CODECS


@dataclass(frozen=True)
class GenerateOptions:
    """Options of one generation.

    Args:
        max_new_tokens: Largest number of tokens to draw.
        temperature: Temperature of the draw; 0 is greedy.
        top_p: Draw only among the most likely tokens that together have this probability; 1 is off.
        top_k: Draw only among this many most likely tokens; 0 is off.
        seed: Seed of the draws; None chooses one at random.
        stop_ids: Token ids after which generation stops.
        compress: Codec of the states between peers. "auto" lets the peers compress on links that slow the generation
            down.
        min_p: Draw only among tokens with at least this share of the most likely token's probability; 0 is off.
        frequency_penalty: Penalty for each time that a token was generated.
        presence_penalty: Penalty for tokens that were generated at all.
        repetition_penalty: Penalty for tokens of the prompt and of the generated text; 1 is off.
        logit_bias: Values added to the logits of these token ids.
        logprobs: Return the log probability of each token and of this many of the most likely tokens; None returns
            none.
        grammar: Grammar that the text follows. The text is complete unless `max_new_tokens` ends it.
        adapter: Name of the swarm's adapter to use; "" is the model alone.
        drafts: Source of guessed tokens, which make answers faster and never change them. "lookup" takes them from the
            prompt, the answer and the grammar, "auto" from whatever the first peer has; "off" is none.

    Raises:
        UsageError: A value is outside its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    compress: str = AUTO
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: Grammar | None = None
    adapter: str = ""
    drafts: str = LOOKUP

    def __post_init__(self) -> None:
        penalty = max(abs(self.frequency_penalty), abs(self.presence_penalty))
        least, most = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        biases, grammar = self.logit_bias, self.grammar
        grammar_bytes = 1 if grammar is None else len(grammar.text.encode())
        rules = (
            (1 <= self.max_new_tokens <= MAX_POSITIONS, f"max_new_tokens must be between 1 and {MAX_POSITIONS}"),
            (
                0 <= self.temperature <= MAX_TEMPERATURE,
                f"temperature must not be negative, nor above {MAX_TEMPERATURE:g}",
            ),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (0 <= self.top_k <= MAX_TOKEN_ID, f"top_k must not be negative, nor above {MAX_TOKEN_ID}"),
            (len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} stop tokens"),
            (all(0 <= token <= MAX_TOKEN_ID for token in self.stop_ids), "stop tokens must be token ids"),
            (self.seed is None or 0 <= self.seed <= MAX_SEED, "seed must be a number of 63 bits"),
            (self.compress in COMPRESSIONS, f"compress must be one of {', '.join(COMPRESSIONS)}"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (
                penalty <= MAX_PENALTY,
                f"frequency_penalty and presence_penalty must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}",
            ),
            (least <= self.repetition_penalty <= most, f"repetition_penalty must be between {least:g} and {most:g}"),
            (len(biases) <= MAX_BIASES, f"at most {MAX_BIASES} tokens may have a bias"),
            (all(0 <= token <= MAX_TOKEN_ID for token in biases), "biases are for token ids"),
            (
                all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()),
                f"biases must be between -{MAX_BIAS:g} and {MAX_BIAS:g}",
            ),
            (
                0 < len(self.drafts) <= MAX_PROPOSER_CHARS,
                f"drafts must be one of {', '.join(DRAFT_SOURCES)}, or the name of a draft model",
            ),
            (0 < grammar_bytes <= MAX_GRAMMAR_CHARS, f"a grammar has at most {MAX_GRAMMAR_CHARS} bytes"),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be between 0 and {MAX_LOGPROBS}",
            ),
        )
        for kept, rule in rules:
            if not kept:
                raise UsageError(rule)

    def sampling(self, prompt_length: int) -> Sampling:
        """Return the sampling parameters as they are sent. Draws a seed if `seed` is None."""
        return Sampling(
            prompt_length=prompt_length,
            max_new_tokens=self.max_new_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=self.top_k,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
            stop_ids=self.stop_ids,
            min_p=float(self.min_p),
            frequency_penalty=float(self.frequency_penalty),
            presence_penalty=float(self.presence_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=tuple((token, float(bias)) for token, bias in self.logit_bias.items()),
            logprobs=self.logprobs,
            grammar=self.grammar,
        )

    def spec(
        self, prompt: Sequence[int], *, vocabulary: int | None = None, allowed: Collection[int] = SERVING_CODECS
    ) -> SessionSpec:
        """Return the session that generates after `prompt`. `vocabulary`: number of token ids; `allowed`: codecs of the
        swarm."""
        return SessionSpec(
            Mode.RING,
            max_length=len(prompt) + self.max_new_tokens - 1,  # the last token is drawn and not fed
            sampling=self.sampling(len(prompt)),
            codec=codec_named(self.compress),
            adapts=self.compress == AUTO,
            allowed=frozenset(allowed),
            prompt_tokens=len(prompt) - 1,  # the prompt's last token leads to the first new token
            prompt=tuple(prompt),
            width=vocabulary or MAX_WIDTH,
            adapter=self.adapter,
            proposer="" if self.drafts == NO_DRAFTS else self.drafts,
        )


MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class GenerateKeywords(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream`, `chat` and `stream_chat`: `max_tokens`, `stop`, and the fields of
    GenerateOptions.

    `max_tokens` is the largest number of new tokens; `max_new_tokens` is transformers' name for it. The text ends before
    the first of the `stop` strings (at most 16).
    """

    max_tokens: int
    stop: str | Sequence[str]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_ids: tuple[int, ...]
    compress: str
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    grammar: Grammar | None
    adapter: str
    drafts: str


def with_keywords(
    options: GenerateOptions | None, keywords: GenerateKeywords
) -> tuple[GenerateOptions, tuple[str, ...]]:
    """Return `options` (or the defaults) with the fields in `keywords`, and the stop strings.

    Raises UsageError for a value outside its range, and TypeError for an unknown keyword.
    """
    fields: dict[str, Any] = dict(keywords)
    if unknown := sorted(fields.keys() - GenerateKeywords.__annotations__.keys()):
        raise TypeError(
            f"unknown keyword {unknown[0]!r}; known are {', '.join(sorted(GenerateKeywords.__annotations__))}"
        )
    stop = fields.pop("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS or any(not 0 < len(each) <= MAX_STOP_CHARS for each in stops):
        raise UsageError(f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    if "max_tokens" in fields:
        if "max_new_tokens" in fields:
            raise UsageError("max_tokens and max_new_tokens mean the same: give one of them")
        fields["max_new_tokens"] = fields.pop("max_tokens")
    return replace(options or GenerateOptions(), **fields), stops


@dataclass
class Generation(SessionStats):
    """Result of a generation, and its course. Times are seconds since the call; `longest_stall_s` is the longest wait
    for a token.

    `trace` is the id for `swarmnode why trace`. `logprobs`, if requested, has for each token its own entry first, then
    those of the most likely tokens.
    """

    ids: list[int] = field(default_factory=list)
    text: str | None = None
    first_token_s: float = 0.0
    seconds: float = 0.0
    route: tuple[HopSpec, ...] = ()
    trace: str = ""
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    cached_tokens: int = 0  # positions of the prompt that the first hop had from an earlier text
    whole: bool = False  # whether the text ended by itself, not at `max_new_tokens`
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)  # guessed tokens by proposer and result

    @property
    def accepted_drafts(self) -> int:
        """Number of guessed tokens that were right."""
        return sum(count for (_, result), count in self.drafts.items() if result == ACCEPTED)

    @property
    def wasted_drafts(self) -> int:
        """Number of guessed tokens that the last hop computed in vain."""
        return sum(count for (_, result), count in self.drafts.items() if result == WASTED)

    @property
    def tokens_per_turn(self) -> float:
        """Tokens for each turn of the ring that brought some; 1 without guesses, 0 without tokens."""
        return len(self.ids) / (len(self.ids) - self.accepted_drafts) if self.ids else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first one, over the time after it. With one token, its rate over the whole
        time; 0 without tokens."""
        if len(self.ids) < 2:
            return 0.0 if not self.ids else 1.0 / max(self.seconds, 1e-9)
        return (len(self.ids) - 1) / max(self.seconds - self.first_token_s, 1e-9)


Audit = Callable[[ClientSession, Sequence[int]], bool]
"""Function of (a session that is over, its token ids) that returns whether it audits the session, and then closes it."""


@dataclass(eq=False)
class RingStream:
    """The tokens of one generation, as they come: `async for token in stream`. `stream.result` fills up meanwhile.

    `session` is a new session with the specification of `options`. `beginnings` has the texts of kept sessions and prompts
    under way: if one of `owner` has enough of its beginning in common with the prompt, this generation continues or copies it.
    """

    session: ClientSession
    options: GenerateOptions
    _: KW_ONLY
    audit: Audit = lambda _session, _ids: False
    beginnings: Beginnings | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        self._beginnings = Beginnings() if self.beginnings is None else self.beginnings
        self._is_retained = self.beginnings is not None and self.options.grammar is None  # if the text is complete
        self._under_way: SharedText | None = None
        self._began_elsewhere = False  # then its hops may lack what an audit asks for
        self._spec = self.session.spec
        self.prompt = list(self._spec.prompt)
        self.result = Generation(trace=self.session.trace_id.hex())

    def __repr__(self) -> str:
        return f"<RingStream {len(self.result.ids)} tokens of {self.options.max_new_tokens}, {self.session!r}>"

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        started_s = self.session.clock()
        ending, final, is_audited = "failed", False, False
        try:
            begin = await self._begin()
            for entry in self._entries(begin, len(self.prompt)):
                self.session.send(entry, expect=len(self.prompt))
            while not final and len(self.result.ids) < self.options.max_new_tokens:
                received = await self.session.receive()
                if self._under_way is not None:
                    self._under_way.record_output()
                final = received.output.final
                self._record(received.output, self.session.clock() - started_s)
                if self.options.logprobs is not None:
                    self.result.logprobs.append(unpack_logprobs(received.payload))
                yield received.output.ids[0]
            is_whole = not self._began_elsewhere and not self.session.was_taken_over
            is_audited = is_whole and self.audit(self.session, self.text)
            self.result.whole = final and len(self.result.ids) < self.options.max_new_tokens
            ending = "done"
        except (GeneratorExit, asyncio.CancelledError):
            ending = "left"
            raise
        finally:
            self.session.meter.sessions[ending] += 1
            if self._under_way is not None:
                self._beginnings.leave(self._under_way)
            if is_audited:
                pass  # the auditor closes it
            elif ending == "done" and final and self._is_retained:
                await self._beginnings.retain(self.owner, self.session, self.text[:-1])
            else:
                await self.session.close()

    @property
    def text(self) -> list[int]:
        """Token ids of the prompt and of the generated text."""
        return self.prompt + self.result.ids

    async def _begin(self) -> int:
        """Open the session, or continue a kept one. Returns the number of the prompt's positions that need not be sent."""
        beginning = await self._beginnings.find(self.owner, self.prompt, self._spec, self.session.config.progress_s)
        if beginning.goes_on is not None:
            self.session = beginning.goes_on
            self.session.go_on(self._spec, beginning.length)
        self.session.stats = self.result
        self._under_way = self._beginnings.enter(self.owner, self.prompt, self.session)
        if beginning.source is not None:
            self.session.begin_as(beginning.source, beginning.truncations, self._entries(0, beginning.length))
        self._began_elsewhere = beginning.length > 0
        await self.session.start()
        self.result.cached_tokens = min(beginning.length, self.session.had)
        return beginning.length

    def _entries(self, begin: int, end: int) -> list[Entry]:
        """Return the prompt's positions in chunks, so that later hops work on one chunk while earlier hops work on the
        next."""
        size = self.session.config.prompt_chunk_tokens
        starts = range(begin, end, size)
        return [ids_entry(start, [self.prompt[start : min(start + size, end)]], Want.NOTHING) for start in starts]

    def _record(self, output: Output, elapsed_s: float) -> None:
        result, meter = self.result, self.session.meter
        meter.tokens += 1
        if not result.ids:
            result.first_token_s = elapsed_s
            meter.first_token.observe(elapsed_s)
        else:
            meter.token.observe(elapsed_s - result.seconds)
        result.ids.append(output.ids[0])
        for draft, count in drafts_in(output):
            result.drafts[draft] += count
            meter.drafts[draft] += count
        result.trace = self.session.trace_id.hex()
        result.seconds = elapsed_s
        result.route = self.session.route


def drafts_in(output: Output) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the guesses that an output tells: (proposer, result), and their number. A last hop of an older version names no
    proposer."""
    if output.guessed:
        yield (ProposerKind.numbered(output.proposer).label, ACCEPTED), 1
    for number, count in enumerate(output.wasted_by or (output.wasted,)):
        if count:
            yield (ProposerKind.numbered(number).label, WASTED), count
