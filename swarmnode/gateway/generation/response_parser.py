"""Parsers that split what a model writes in a chat into reasoning, text and tool calls while it arrives.

Answer as a sequence of parts of different kinds, as newer APIs have it (OpenAI's output items, Anthropic's content blocks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from swarmnode.client.text_stream import StopStrings
from swarmnode.data.conversation import CALL_BEGIN, CALL_END
from swarmnode.files import parse_json
from swarmnode.gateway.generation.request_fields import ToolUse

TEXT = "content"
REASONING = frozenset({"thinking", "reasoning", "reasoning_content"})
CALLS = "tool_calls"
THOUGHTS_BEGIN, THOUGHTS_END = "<think>", "</think>"
KEY = re.compile(r'\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
SEPARATOR = re.compile(r"\s*,")
FIRST_KEY = re.compile(rf'\s*(?:{CALL_BEGIN})?\s*\{{\s*"([^"\\]*)"')
CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})  # a call begins with one of them


class CallPart(NamedTuple):
    """Part of a tool call. `number` counts the calls of an answer from 0; the arguments of all parts of a call make its JSON text.
    `cut` means that the answer reached its limit inside the call."""

    number: int
    name: str
    arguments: str = ""
    cut: bool = False


class Parsed(NamedTuple):
    """Parsed part of an answer: text, or reasoning, or a part of a tool call."""

    text: str = ""
    reasoning: str = ""
    call: CallPart | None = None


class JsonObject:
    """Scanner that finds the end of a JSON object while its text arrives."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_broken = False  # the text does not begin with an object

    def end(self, text: str) -> int | None:
        """Add `text`; return the index in it behind the object's end, or None if the object does not end in it."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                else:
                    self._in_string = char != '"'
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0:
                if not char.isspace():
                    self.is_broken = True
                    return index
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
            else:
                self._in_string = char == '"'
        return None


def members_of(body: str) -> Iterator[tuple[str, int, Any]]:
    """Yield key, index of the value and value of each member of the JSON object that begins `body`. A last value that is cut off is
    None. Ends without an error where the text is no JSON."""
    decoder = json.JSONDecoder()
    position = body.find("{")
    while position >= 0 and (key := KEY.match(body, position + 1)):
        try:
            value, position = decoder.raw_decode(body, key.end())
        except (ValueError, RecursionError):
            yield key[1], key.end(), None
            return
        yield key[1], key.end(), value
        separator = SEPARATOR.match(body, position)
        position = -1 if separator is None else separator.end() - 1


def call_of(value: Any, names: Collection[str], number: int) -> CallPart | None:
    """Return the whole call that `value` describes; None if it describes no call of a tool in `names`. Arguments that the model
    wrote as a JSON text are unwrapped once."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or name not in names:
        return None
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    return CallPart(number, name, json.dumps({} if arguments is None else arguments))


def cut_call(body: str, names: Collection[str], number: int) -> CallPart | None:
    """Return the call in `body`, which the limit of the answer has cut off, with the arguments up to there; None if no name of
    `names` is known yet."""
    members = {key: (begin, value) for key, begin, value in members_of(body)}
    _, name = members.get("name", (0, None))
    if not isinstance(name, str) or name not in names:
        return None
    begin, _ = members.get("arguments") or members.get("parameters") or (len(body), None)
    return CallPart(number, name, body[begin:], cut=True)


class ToolCallParser:
    """Parser that passes a text through, except the calls of the tools in `names`: JSON objects between `CALL_BEGIN` and
    `CALL_END`, or bare ones at the beginning. A call of one of `forced` is returned in parts while it arrives, any other one when
    it is complete."""

    def __init__(self, names: Collection[str], forced: Collection[str] = ()) -> None:
        self._names = names
        self._forced = forced
        self._opening = StopStrings([CALL_BEGIN])
        self._number = 0  # of the next call
        self._pending: str | None = ""  # white space at the beginning or behind a call; None within a text
        self._held = ""  # text of a possible call from its opening tag on
        self._object: JsonObject | None = None  # its scanner; None outside of a possible call
        self._part: CallPart | None = None  # call that is returned in parts
        self._arguments: JsonObject | None = None  # scanner of the arguments of that call; None before them
        self._whole = False  # whether those arguments have ended

    def push(self, text: str) -> list[Parsed]:
        """Add `text` and return the parts that are certain by now, in their order."""
        told: list[Parsed] = []
        if self._part is None and not self._number and len(self._forced) == 1 and text:
            [name] = self._forced
            self._part = CallPart(0, name)  # nothing else can come, so the client need not wait for the name
            told.append(Parsed(call=self._part))
        while text:
            text = self._read_text(text, told) if self._object is None else self._read_call(text, told)
        return told

    def finish(self, *, cut: bool) -> list[Parsed]:
        """Return the parts that were held back. A call that the limit or a stop string has `cut`, or whose name was returned, is
        returned with its arguments up to there; any other call without an end is text."""
        if self._part is not None:  # the client has its name already, so it can be no text any more
            call = None if self._arguments else cut_call(self._held, self._names, self._number)
            return [Parsed(call=call or self._part._replace(cut=not self._whole))]
        parsed: list[Parsed] = []
        while self._object is not None:
            held, self._held, self._object = self._held, "", None
            broken, tag, rest = held.partition(CALL_END)
            if tag:  # a call without a valid end; a later one may be valid
                self._pending = None
                parsed += [Parsed(broken + tag), *self.push(rest)]
                continue
            call = cut_call(held, self._names, self._number) if cut else None
            if call is not None:
                return [*parsed, Parsed(call=call)]
            return parsed if cut and (self._forced or held.startswith(CALL_BEGIN)) else [*parsed, Parsed(held)]
        rest = self._pending or ""
        if self._number and CALL_END.startswith(rest.strip()):
            rest = ""
        return [*parsed, Parsed(rest + self._opening.flush())]

    def _read_text(self, text: str, parsed: list[Parsed]) -> str:
        """Add text outside of calls and return the part of it that is not read yet."""
        if self._pending is not None:  # white space around calls is no text of the answer
            self._pending += text
            seen = self._pending.lstrip()
            if self._number and seen.startswith((CALL_END, ";")):
                self._pending = ""
                return seen[len(CALL_END if seen.startswith(CALL_END) else ";") :]
            if seen != CALL_BEGIN and (CALL_BEGIN.startswith(seen) or (self._number and CALL_END.startswith(seen))):
                return ""
            text, self._pending = self._pending, None
            if seen.startswith("{"):
                self._object = JsonObject()
                return text
            text = seen if seen.startswith(CALL_BEGIN) else text
        certain = self._opening.push(text)
        if certain:
            parsed.append(Parsed(certain))
        if self._opening.matched is None:
            return ""
        rest, self._opening = self._opening.rest, StopStrings([CALL_BEGIN])
        self._held, self._object = CALL_BEGIN, JsonObject()
        return rest

    def _read_call(self, text: str, parsed: list[Parsed]) -> str:
        """Add text of a possible call and return the part of it that is not read yet."""
        assert self._object is not None
        end = self._object.end(text)
        inside, rest = (text, "") if end is None else (text[:end], text[end:])
        if self._arguments is not None:
            self._tell_arguments(inside, parsed)
        self._held += inside
        if self._forced and self._arguments is None:
            self._begin_arguments(parsed)
        first = FIRST_KEY.match(self._held)
        if self._object.is_broken or (first is not None and first[1] not in CALL_KEYS):
            parsed.append(Parsed(self._held))  # no call
            self._held, self._object = "", None
        elif end is not None:
            self._end_call(parsed)
        return rest

    def _begin_arguments(self, parsed: list[Parsed]) -> None:
        """Begin to return a forced call in parts as soon as its name and the first character of its arguments are known."""
        members = {key: (begin, value) for key, begin, value in members_of(self._held)}
        (_, name), (begin, _) = members.get("name", (0, None)), members.get("arguments", (len(self._held), None))
        if name not in self._forced or not self._held.startswith("{", begin):
            return
        if self._part is None:
            self._part = CallPart(self._number, name)
            parsed.append(Parsed(call=self._part))
        self._arguments = JsonObject()
        self._tell_arguments(self._held[begin:], parsed)

    def _tell_arguments(self, text: str, parsed: list[Parsed]) -> None:
        assert self._part is not None and self._arguments is not None
        if not self._whole:
            end = self._arguments.end(text)
            parsed.append(Parsed(call=self._part._replace(arguments=text[:end])))
            self._whole = end is not None

    def _end_call(self, parsed: list[Parsed]) -> None:
        """End a possible call whose object is complete: as the call that it describes, else as text."""
        body, self._held, self._object = self._held, "", None
        if self._arguments is None:
            try:
                call = call_of(json.loads(body.removeprefix(CALL_BEGIN)), self._names, self._number)
            except (ValueError, RecursionError):
                call = None
            parsed.append(Parsed(body) if call is None else Parsed(call=call))
            if call is None:
                return
        self._part = self._arguments = None
        self._whole = False
        self._number, self._pending = self._number + 1, ""


class ReasoningParser:
    """Parser that splits a text into reasoning and answer while it arrives. `begun` means that the prompt has already opened the
    reasoning."""

    def __init__(self, *, begun: bool) -> None:
        self._inside = begun
        self._end = StopStrings([THOUGHTS_END])
        self._start = ""  # text that may still become THOUGHTS_BEGIN
        self._undecided = not begun
        self._has_text = False  # whether the present part has text, so that line breaks are no longer stripped

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning."""
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """Add `text`; return the parts that are certainly reasoning and certainly answer."""
        if self._undecided:
            self._start += text
            seen = self._start.lstrip()
            if len(seen) < len(THOUGHTS_BEGIN) and THOUGHTS_BEGIN.startswith(seen):
                return "", ""
            self._undecided, self._inside = False, seen.startswith(THOUGHTS_BEGIN)
            text = seen[len(THOUGHTS_BEGIN) :] if self._inside else self._start
        if not self._inside:
            return "", self._led(text) if self._end.matched else text
        reasoning = self._led(self._end.push(text))
        if self._end.matched is None:
            return reasoning, ""
        self._inside = self._has_text = False
        return reasoning, self._led(self._end.rest)

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, as reasoning and answer."""
        if self._undecided:
            return "", self._start
        return self._end.flush(), ""

    def _led(self, text: str) -> str:
        """Strip the line breaks that templates put around both parts."""
        text = text if self._has_text else text.lstrip("\n")
        self._has_text = self._has_text or bool(text)
        return text


class ResponseParser(Protocol):
    """Parser of one answer."""

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        ...

    def push(self, text: str) -> Sequence[Parsed]:
        """Add the next piece of the model's text and return the parts that are certain by now, in their order; they may be none."""
        ...

    def finish(self, *, cut: bool) -> Sequence[Parsed]:
        """End the answer and return the parts that were held back. If the limit has `cut` the answer inside a call of a known tool,
        the call is returned with its arguments up to there."""
        ...


class CommonParser:
    """Parser for models whose tokenizer does not define the format of answers: it reads the formats that most models share."""

    def __init__(self, tools: ToolUse, reasoning: ReasoningParser | None = None) -> None:
        """Without `reasoning` the whole text is the answer."""
        self._reasoning = reasoning
        self._calls = ToolCallParser(tools.names, tools.forced_names) if tools.offered else None
        self._tools = tools

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> list[Parsed]:
        """Add the next piece of the model's text and return the parts that are certain by now."""
        reasoning, text = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._allowed_parts(reasoning, [Parsed(text)] if self._calls is None else self._calls.push(text))

    def finish(self, *, cut: bool) -> list[Parsed]:
        """End the answer and return the parts that were held back."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return self._allowed_parts(reasoning, [Parsed(text)])
        return self._allowed_parts(reasoning, [*self._calls.push(text), *self._calls.finish(cut=cut)])

    def _allowed_parts(self, reasoning: str, parts: Iterable[Parsed]) -> list[Parsed]:
        return [
            part for part in (Parsed(reasoning=reasoning), *parts) if any(part) and _allowed(part.call, self._tools)
        ]


class TemplateParser:
    """Parser by the checkpoint's own response template. `parser` is transformers' `ResponseParser`, which needs special tokens in
    the text. Text that it cannot read is passed through as it is."""

    def __init__(self, parser: Any, tools: ToolUse) -> None:
        self._parser = parser
        self._tools = tools
        self._number = 0  # of the next call
        self._region: str | None = None
        self._held = ""  # text of a call that has not ended
        self._unread = ""  # text that was fed but not returned; returned if parsing fails
        self._failed = False
        self._read(parser.initial_events)  # the part of the answer that is in the prompt

    @property
    def reasoning(self) -> bool:
        """Whether the model is still reasoning."""
        return self._region in REASONING

    def push(self, text: str) -> list[Parsed]:
        """Add the next piece of the model's text and return the parts that are certain by now."""
        if self._failed:
            return [Parsed(text)]
        self._unread += text
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError, TypeError):  # broken JSON in a call, as models write now and then
            return self._fail()

    def finish(self, *, cut: bool) -> list[Parsed]:
        """End the answer and return the parts that were held back. A `cut` call whose tool is not known yet is left out."""
        if self._failed:
            return []
        if cut and self._region == CALLS:
            call = cut_call(self._held, self._tools.names, self._number)
            return [Parsed(call=call)] if call is not None and _allowed(call, self._tools) else []
        try:
            _, events = self._parser.finalize()
            return [*self._read(events), Parsed(self._held)]
        except (ValueError, KeyError, TypeError):
            return self._fail()

    def _fail(self) -> list[Parsed]:
        self._failed = True
        return [Parsed(self._unread)]

    def _read(self, events: Iterable[Mapping[str, Any]]) -> list[Parsed]:
        parsed: list[Parsed] = []
        for event in events:
            field, kind = event["field"], event["type"]
            self._region = None if kind == "region_close" else field
            if field == CALLS:
                parsed += self._read_call(event)
            elif kind == "region_chunk" and field == TEXT:
                parsed.append(Parsed(event["text"]))
            elif kind == "region_chunk" and field in REASONING:
                parsed.append(Parsed(reasoning=event["text"]))
            if self._region != CALLS:  # the text after the last event may be the beginning of a call
                self._unread = self._unread.rpartition(event["text"])[2] if kind == "region_chunk" else ""
        return parsed

    def _read_call(self, event: Mapping[str, Any]) -> list[Parsed]:
        """Return the calls that end with `event`, or their text if one of them is no call of an offered tool."""
        if event["type"] != "region_close":
            self._held += event.get("text", "")
            return []
        held, self._held = self._held, ""
        values = event["value"] if isinstance(event["value"], list) else [event["value"]]
        calls = [call_of(value, self._tools.names, self._number + index) for index, value in enumerate(values)]
        if not calls or None in calls:
            return [Parsed(held)]
        self._number += len(calls)
        return [Parsed(call=call) for call in calls if _allowed(call, self._tools)]


def _allowed(call: CallPart | None, tools: ToolUse) -> bool:
    """Return whether an answer may have `call`: without parallel calls the first one alone."""
    return call is None or tools.parallel or call.number == 0


class TokenUsage(NamedTuple):
    """Token counts of an answer. `cached` is the number of prompt tokens that came from a cache, `reasoning` the number of
    completion tokens before the answer."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class PartKind(Enum):
    """Kind of a part."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class AnswerPart:
    """Part of an answer. `text` is its text up to now; for a call, its arguments. `call` is the first part of a call."""

    index: int
    kind: PartKind
    text: str = ""
    call: CallPart | None = None


class PartStep(Enum):
    """Kind of an event of a part."""

    BEGIN = auto()
    DELTA = auto()
    END = auto()


class PartEvent(NamedTuple):
    """Event of a part; `text` is the addition of a delta, else empty."""

    step: PartStep
    part: AnswerPart
    text: str = ""


class Parts:
    """Parts of one answer up to now. The last one is open if more of its kind may follow."""

    def __init__(self) -> None:
        self.all: list[AnswerPart] = []
        self._open: AnswerPart | None = None

    def push(self, reasoning: str, text: str, call: CallPart | None, *, over: bool = False) -> Iterator[PartEvent]:
        """Add new reasoning, text or a part of a call, and yield the events. If `over` is true, close the last part; an answer
        without text and calls gets an empty text."""
        yield from self._add(PartKind.REASONING, reasoning)
        yield from self._add(PartKind.TEXT, text)
        if call is not None:
            if self._open is None or self._open.call is None or self._open.call.number != call.number:
                yield from self._begin(PartKind.CALL, call)
            yield from self._add(PartKind.CALL, call.arguments)
        if over:
            if all(part.kind is PartKind.REASONING for part in self.all):
                yield from self._begin(PartKind.TEXT)
            yield from self._close()

    def _add(self, kind: PartKind, text: str) -> Iterator[PartEvent]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        part = self.all[-1]
        part.text += text
        yield PartEvent(PartStep.DELTA, part, text)

    def _begin(self, kind: PartKind, call: CallPart | None = None) -> Iterator[PartEvent]:
        yield from self._close()
        self._open = AnswerPart(len(self.all), kind, call=call)
        self.all.append(self._open)
        yield PartEvent(PartStep.BEGIN, self._open)

    def _close(self) -> Iterator[PartEvent]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield PartEvent(PartStep.END, closed)
