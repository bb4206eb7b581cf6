"""How to draw, as requests of every API say it. Of fields that are not here those that would change the answer are refused;
None is as if it were not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from swarmnode.codec.body import MAX_POSITIONS, MAX_SEED, MAX_STOP_IDS, MAX_TEMPERATURE, MAX_TOKEN_ID
from swarmnode.codec.sampling import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    Grammar,
    GrammarKind,
)
from swarmnode.gateway.generation.refused_fields import check_refused
from swarmnode.gateway.generation.tool_use import ResponseFormat, ToolUse
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.json_bound import Items


def _checked_count(biases: Any) -> Any:
    """Raises ValueError where there are too many, before each of them is looked at."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens may have a bias")
    return biases


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Biases = Annotated[dict[TokenId, Bias], BeforeValidator(_checked_count)]
NewTokens = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
AS_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    *PENALTIES,
    "logit_bias",
)  # they are called so in GenerateOptions, too
MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The same. Raises ApiError where there are too many, or too long ones."""
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_request(f"at most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters are possible", "stop")
    return tuple(stops)


class StreamOptions(BaseModel):
    """`include_usage`: a last event tells how many tokens it was."""

    include_usage: bool = False


def check_type(type_: str | None, known: Sequence[str | None], what: str) -> None:
    """Raise ApiError for a tool that is of no known type; `what` says which ones are known."""
    if type_ not in known:
        raise bad_request(f"a tool of type {type_!r} is not known here: {what}", "tools")


class SamplingFields(BaseModel, extra="allow"):
    """How to draw, as chats and completions have it in common. What else a request says is kept, to see if it can be ignored."""

    model: str = ""
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)  # vLLM's -1 is off, as 0 is
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    seed: int | None = None
    max_tokens: NewTokens | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0, le=MAX_POSITIONS)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_ignored(self) -> SamplingFields:
        """Raises ApiError for what would be ignored, and changes an answer."""
        check_refused(self.model_extra or {})
        endless = self.ignore_eos and not self.stop and not self.stop_token_ids
        if self.min_tokens and not endless:
            raise bad_request("min_tokens is possible with ignore_eos and without stops alone", "min_tokens")
        return self

    @property
    def new_tokens(self) -> int | None:
        """How many at most; None where it is not said."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text. Raises ApiError where there are too many, or too long ones."""
        return checked_stops((self.stop,) if isinstance(self.stop, str) else self.stop or ())

    @property
    def texts(self) -> int:
        """How many are wanted of each prompt."""
        return 1

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools of a chat; None where the text is no chat and is told as the model writes it. Raises ApiError."""
        return None

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends by saying how many tokens it was."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def told_logprobs(self) -> int | None:
        """Of how many tokens beside the drawn one the logarithms of their probabilities are told; None where of none."""
        return None

    def followed_grammar(self) -> Grammar | None:
        """What the text must follow: a call where the model is forced to make one, else `grammar`, which is Lark's, or the format.
        Raises ApiError."""
        if self.tool_use is not None and (call := self.tool_use.grammar()) is not None:
            return call
        if self.grammar is not None:
            return Grammar(GrammarKind.LARK, self.grammar)
        return None if self.response_format is None else self.response_format.grammar()

    def drawing(self, choice: int, grammar: Grammar | None, defaults: Mapping[str, float | int]) -> dict[str, Any]:
        """GenerateOptions' fields for one of the texts that are asked for: each has a seed of its own. `defaults` are the model's
        own, of what the request does not say."""
        seed = None if self.seed is None else (self.seed + choice) & MAX_SEED
        said = {name: value for name in AS_OPTIONS if (value := getattr(self, name)) is not None}
        beside = {"logprobs": self.told_logprobs, "grammar": grammar, "seed": seed}
        drawing = {"temperature": 1.0, **defaults, **said, **beside}
        return {**drawing, "top_k": max(0, drawing.get("top_k", 0))}
