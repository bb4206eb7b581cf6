"""Sampling fields that all APIs share. Unknown fields that would change the answer are refused. A field that is None counts as
absent.

Fields of OpenAI's, Anthropic's, vLLM's and llama.cpp's APIs that the gateway does not support and that would change an answer. A
request with such a field is refused, unless the value asks for what happens anyway. Fields that change no answer are ignored: see
docs/api.md.

Tools that a model may or must call, in a form that all APIs share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

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
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.http.body_route import Items, at_most

MAX_TOOLS = 256
NONE, AUTO, REQUIRED = "none", "auto", "required"
Tool = dict[str, Any]  # in the format of OpenAI's chats, which chat templates expect
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class NamedSchema(BaseModel):
    """JSON schema with a name."""

    name: str = ""
    definition: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(BaseModel):
    """Format of the answer. `type` is text, json_object or json_schema. The schema is in `json_schema` or, in /v1/responses and
    /v1/messages, in `schema` beside the type."""

    type: str
    json_schema: NamedSchema | None = None
    definition: dict[str, Any] | bool | None = Field(None, alias="schema")

    def grammar(self) -> Grammar | None:
        """Return the grammar of the format; None if `type` is text. Raises ApiError if the type is unknown or its schema is
        missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(ANY_OBJECT)
        schema = self.definition if self.json_schema is None else self.json_schema.definition
        if self.type != "json_schema" or schema is None:
            raise bad_request(
                "a response format must be text, json_object, or json_schema with a schema", "response_format"
            )
        return json_grammar(schema)


def json_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """Return the grammar of JSON texts that fit `schema`."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def tool_call_grammar(tools: Sequence[Mapping[str, Any]]) -> Grammar:
    """Return the grammar of one call of one of `tools`, in the format that `ToolCallParser` reads. Raises ApiError if two tools
    define a schema of the same name differently."""
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or ANY_OBJECT)
        for word, defined in definitions.items():  # references are resolved from the root of the schema
            own = parameters.pop(word, {})
            if any(defined.get(name, schema) != schema for name, schema in own.items()):
                raise bad_request(f"two tools define the same name in their {word}: rename one of them", "tools")
            defined.update(own)
        fields = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    return json_grammar({"anyOf": calls, **{word: defined for word, defined in definitions.items() if defined}})


@dataclass(frozen=True)
class ToolUse:
    """Tools of a chat. The model sees the `offered` ones, and must call one of `forced` if there are any; `parallel` allows several
    calls in one answer."""

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    parallel: bool = True

    @classmethod
    def choose(
        cls, tools: Sequence[Tool], choice: str = AUTO, name: str | None = None, *, parallel: bool = True
    ) -> ToolUse:
        """Return the use of `tools` by `choice`: none, auto, or required, of one of them if `name` is given. Raises ApiError if the
        choice is unknown or names no tool."""
        forced = [tool for tool in tools if name in (None, name_of(tool))] if choice == REQUIRED else []
        if choice not in (NONE, AUTO, REQUIRED) or (choice == REQUIRED and not forced):
            raise bad_request(
                "tool_choice must be none, auto, required, or the name of one of the tools", "tool_choice"
            )
        return cls([] if choice == NONE else tools, forced, parallel)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools that the model may call."""
        return frozenset(map(name_of, self.offered))

    @property
    def forced_names(self) -> frozenset[str]:
        """Names of the tools if the model must call one of them; empty if it need not."""
        return frozenset(map(name_of, self.forced))

    def grammar(self) -> Grammar | None:
        """Return the grammar of a tool call if the model must make one, else None. Raises ApiError."""
        return tool_call_grammar(self.forced) if self.forced else None


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """Return a tool in the format of chat templates, from the fields of another API."""
    told = {"description": description} if description else {}
    schema = dict(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def name_of(tool: Tool) -> str:
    """Return the name of a tool."""
    return str(tool["function"]["name"])


FORMATS = "use response_format or grammar to constrain the text"
BEAMS = "texts are sampled token by token, without beams"
ONLY_TEXT = "models here read and write only text"
OTHER_DRAWING = "use temperature, top_p, top_k, min_p and the penalties"
ONLY_BIASES = "use logit_bias or a grammar to allow or forbid tokens"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {  # by field: the values that ask for nothing, and the reason
    "use_beam_search": ((False,), BEAMS),
    "length_penalty": ((1,), BEAMS),
    "early_stopping": ((False,), BEAMS),
    "include_stop_str_in_output": ((False,), "the text always ends before its stop string"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself: the gateway cuts none"),
    "prompt_logprobs": ((), "use echo with logprobs of /v1/completions for logprobs of a prompt"),
    "allowed_token_ids": ((), ONLY_BIASES),
    "bad_words": (([],), ONLY_BIASES),
    "logits_processors": (([],), ONLY_BIASES),
    "guided_json": ((), FORMATS),
    "guided_regex": ((), FORMATS),
    "guided_choice": ((), FORMATS),
    "guided_grammar": ((), FORMATS),
    "structured_outputs": ((), FORMATS),
    "json_schema": ((), FORMATS),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "modalities": ((["text"],), ONLY_TEXT),
    "audio": ((), ONLY_TEXT),
    "web_search_options": ((), "models here cannot search: offer a tool that does"),
    "documents": (([],), "write the documents into a message"),
    "chat_template": ((), "the model's own chat template is always used"),
    "mm_processor_kwargs": ((), ONLY_TEXT),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "texts are always written as the tokenizer writes them"),
    "thinking_token_budget": ((), "use max_tokens, which also bounds the reasoning"),
    "container": ((), "the gateway runs no containers"),
    "mcp_servers": (([],), "the gateway calls no servers: offer tools"),
    "typical_p": ((1,), OTHER_DRAWING),
    "tfs_z": ((1,), OTHER_DRAWING),
    "top_a": ((0,), OTHER_DRAWING),
    "mirostat": ((0,), OTHER_DRAWING),
    "dry_multiplier": ((0,), OTHER_DRAWING),
    "xtc_probability": ((0,), OTHER_DRAWING),
    "dynatemp_range": ((0,), OTHER_DRAWING),
    "repetition_detection": ((), "use stop strings and max_tokens to end a text"),
    "n_predict": ((), "use max_tokens"),
}


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Biases = Annotated[dict[TokenId, Bias], at_most(MAX_BIASES, f"at most {MAX_BIASES} tokens may have a bias")]
NewTokens = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
# GenerateOptions has fields of the same names
AS_OPTIONS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES, "logit_bias")
MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return `stops` as a tuple. Raises ApiError if there are too many or one is too long."""
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_request(f"give at most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARS} characters", "stop")
    return tuple(stops)


class StreamOptions(BaseModel):
    """Options of a stream. With `include_usage` the last event has the token counts."""

    include_usage: bool = False


def check_type(type_: str | None, types: Sequence[str | None], what: str) -> None:
    """Raise ApiError if a tool's `type_` is not in `types`; `what` names the known types in the error."""
    if type_ not in types:
        raise bad_request(f"a tool of type {type_!r} is not supported: use {what}", "tools")


class SamplingFields(BaseModel, extra="allow"):
    """Sampling fields that all text APIs share. Unknown fields are kept, so that they can be checked and refused."""

    model: str = ""
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)  # vLLM's -1 turns it off, as 0 does
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
        """Raise ApiError for a field that would be ignored although it changes the answer."""
        told = self.model_extra or {}
        for field in told.keys() & REFUSED.keys():
            anyway, why = REFUSED[field]
            if told[field] is not None and told[field] not in anyway:
                raise bad_request(f"{field} is not supported: {why}", field)
        endless = self.ignore_eos and not self.stop and not self.stop_token_ids
        if self.min_tokens and not endless:
            raise bad_request("min_tokens works only with ignore_eos and without stops: leave it out", "min_tokens")
        return self

    @property
    def new_tokens(self) -> int | None:
        """Maximum of new tokens; None if the request does not say."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text. Raises ApiError if there are too many or one is too long."""
        return checked_stops((self.stop,) if isinstance(self.stop, str) else self.stop or ())

    @property
    def texts(self) -> int:
        """Number of texts for each prompt."""
        return 1

    @property
    def tool_use(self) -> ToolUse | None:
        """Tools of a chat; None if the request is no chat, so that the text is returned as the model writes it. Raises ApiError."""
        return None

    @property
    def form(self) -> ResponseFormat | None:
        """Format of the text in a field that only this API has; None without one."""
        return None

    @property
    def tells_usage(self) -> bool:
        """Whether the last event of a stream has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def logprob_count(self) -> int | None:
        """Number of the most likely tokens that the answer lists for each drawn one; None without logprobs."""
        return None

    def followed_grammar(self) -> Grammar | None:
        """Return the grammar of the text: that of a tool call if the model must call one, else that of the API's own `form`, else
        `grammar` (in Lark's format), else that of `response_format`. None if the text is free. Raises ApiError."""
        if self.tool_use is not None and (call := self.tool_use.grammar()) is not None:
            return call
        if self.form is not None:
            return self.form.grammar()
        if self.grammar is not None:
            return Grammar(GrammarKind.LARK, self.grammar)
        return None if self.response_format is None else self.response_format.grammar()

    def drawing(self, choice: int, grammar: Grammar | None, defaults: Mapping[str, float | int]) -> dict[str, Any]:
        """Return the fields of GenerateOptions for text number `choice`, which gets a seed of its own. `defaults` are the model's
        values for fields that the request leaves out."""
        seed = None if self.seed is None else (self.seed + choice) & MAX_SEED
        said = {name: value for name in AS_OPTIONS if (value := getattr(self, name)) is not None}
        beside = {"logprobs": self.logprob_count, "grammar": grammar, "seed": seed}
        drawing = {"temperature": 1.0, **defaults, **said, **beside}
        return {**drawing, "top_k": max(0, drawing.get("top_k", 0))}
