"""Meters: plain counts of the work of a stage or a client, kept where it happens and read at each scrape of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import Codec
from swarmnode.errors import ErrorCode
from swarmnode.links.switchboard import Channel
from swarmnode.metrics import table
from swarmnode.metrics.metric import SIZES, Histogram, Reading, Readings
from swarmnode.plan.view import Span

SERVE, TRAIN = "serve", "train"
PREFILL, DECODE, FORWARD, BACKWARD = "prefill", "decode", "forward", "backward"
ACCEPTED, WASTED = "accepted", "wasted"  # results of guessed tokens
PHASES = {SERVE: (PREFILL, DECODE), TRAIN: (FORWARD, BACKWARD)}


def by_proposer(drafts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Return the numbers of guesses by proposer, as JSON has them: `drafted` in all, and `accepted` and `wasted` of them."""
    found: dict[str, dict[str, int]] = {}
    for (proposer, result), count in sorted(drafts.items()):
        numbers = found.setdefault(proposer, {"drafted": 0, ACCEPTED: 0, WASTED: 0})
        numbers["drafted"] += count
        numbers[result] += count
    return found


class StageMeter:
    """Meter of one span and one kind of work. The compute thread writes passes and bytes, the event loop writes faults."""

    def __init__(self, span: Span, work: str) -> None:
        self.span = span
        self.work = work
        phases = PHASES[work]
        self.hops = {phase: Histogram() for phase in phases}  # seconds, waiting included
        self.passes = {phase: Histogram() for phase in phases}  # seconds
        self.batches = {phase: Histogram(SIZES) for phase in phases}  # microbatches
        self.tokens = Counter(dict.fromkeys(phases, 0))
        self.unit_tokens = Counter(dict.fromkeys(phases, 0))
        self.microbatches = Counter(dict.fromkeys(phases, 0))
        self.faults: Counter[ErrorCode] = Counter()
        self.drafts: Counter[tuple[str, str]] = Counter()  # by proposer and result
        self._raw_bytes: Counter[tuple[Codec, str]] = Counter()
        self._encoded_bytes: Counter[tuple[Codec, str]] = Counter()

    @property
    def label(self) -> str:
        """The span as metrics and `--span` write it."""
        return f"{self.span.start}:{self.span.end}"

    def record_pass(self, phase: str, pass_s: float, *, microbatches: int, tokens: int, unit_tokens: int) -> None:
        """Count a pass. `unit_tokens`: tokens times the units that each of them passes."""
        self.passes[phase].observe(pass_s)
        self.batches[phase].observe(microbatches)
        self.microbatches[phase] += microbatches
        self.tokens[phase] += tokens
        self.unit_tokens[phase] += unit_tokens

    def record_hop(self, phase: str, seconds: float) -> None:
        """Count the seconds from the arrival of work to its result, waiting included."""
        self.hops[phase].observe(seconds)

    def record_tensors(self, codec: Codec, direction: str, *, raw_bytes: int, encoded_bytes: int) -> None:
        """Count the bytes of tensors encoded for another stage, before and after encoding."""
        self._raw_bytes[codec, direction] += raw_bytes
        self._encoded_bytes[codec, direction] += encoded_bytes

    def readings(self) -> Readings:
        """Yield the metrics of the stage."""
        span = self.label
        for phase in self.passes:
            yield Reading(table.HOP_SECONDS, self.hops[phase], (span, phase))
            yield Reading(table.PASS_SECONDS, self.passes[phase], (span, phase))
            yield Reading(table.BATCH_SIZE, self.batches[phase], (span, phase))
            yield Reading(table.TOKENS, self.tokens[phase], (span, phase))
            yield Reading(table.UNIT_TOKENS, self.unit_tokens[phase], (span, phase))
            yield Reading(table.MICROBATCHES, self.microbatches[phase], (span, phase))
        for code in ErrorCode:
            yield Reading(table.FAULTS, self.faults[code], (span, self.work, cause_of(code)))
        for draft, count in self.drafts.items():
            yield Reading(table.DRAFTS, count, (span, *draft))
        for metric, counts in (
            (table.TENSOR_RAW_BYTES, self._raw_bytes),
            (table.TENSOR_ENCODED_BYTES, self._encoded_bytes),
        ):
            for (codec, direction), count in counts.copy().items():
                yield Reading(metric, count, (span, self.work, codec.name.lower(), direction))


class ClientMeter:
    """Meter of all sessions of one client."""

    def __init__(self) -> None:
        self.sessions = Counter({"done": 0, "failed": 0, "left": 0})
        self.tokens = 0
        self.drafts: Counter[tuple[str, str]] = Counter()  # by proposer and result
        self.first_token = Histogram()  # seconds
        self.token = Histogram()  # seconds
        self.reroutes: Counter[ErrorCode] = Counter()

    def readings(self) -> Readings:
        """Yield the metrics of the client."""
        for result, count in self.sessions.items():
            yield Reading(table.CLIENT_SESSIONS, count, (result,))
        yield Reading(table.CLIENT_TOKENS, self.tokens)
        for draft, count in self.drafts.items():
            yield Reading(table.CLIENT_DRAFTS, count, draft)
        yield Reading(table.FIRST_TOKEN_SECONDS, self.first_token)
        yield Reading(table.TOKEN_SECONDS, self.token)
        for code in ErrorCode:
            yield Reading(table.REROUTES, self.reroutes[code], (cause_of(code),))


class RefusalMeter:
    """Number of requests to one server of a span that were refused, by cause."""

    def __init__(self, span: Span) -> None:
        self._label = f"{span.start}:{span.end}"
        self._refused: Counter[ErrorCode] = Counter()

    def refuse(self, channel: Channel, error: Error) -> None:
        """End a conversation with `error`, and count it."""
        self._refused[ErrorCode(error.code)] += 1
        channel.close(error)

    def readings(self, load: int) -> Readings:
        """Yield the number of running requests, `load`, and of refusals."""
        yield Reading(table.SESSIONS, load, (self._label,))
        for code in ErrorCode:
            yield Reading(table.REFUSALS, self._refused[code], (self._label, cause_of(code)))


def cause_of(code: ErrorCode) -> str:
    """Return the label of a code in metrics."""
    return code.name.lower()
