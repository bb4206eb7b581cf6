"""Formats of training records: those of OpenAI, trl, Axolotl, LLaMA-Factory and Unsloth, as conversations, pairs and texts.

docs/training.md lists their fields. A field that changes what is learnt is honoured or refused; the rest is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from swarmnode.data.conversation import (
    ASSISTANT,
    REASONING_FIELDS,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    Message,
    chat_messages,
    chat_tool,
)
from swarmnode.errors import UsageError
from swarmnode.files import parse_json

MAX_MESSAGES = 4096  # of one conversation
Kind = frozenset[str]  # names of the fields that make a record a sample
TEXT: Kind = frozenset({"text"})
PAIR: Kind = frozenset({"prompt", "completion"})
ALPACA: Kind = frozenset({"instruction", "output"})
CONVERSATIONS = ("messages", "conversations", "conversation")
KINDS = (*(frozenset({name}) for name in CONVERSATIONS), PAIR, ALPACA, TEXT)
SYNONYMS = {  # roles of ShareGPT, LLaMA-Factory and Gemma
    **ROLES,
    **dict.fromkeys(("human",), USER),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), ASSISTANT),
    **dict.fromkeys(("observation", "tool_response"), TOOL),
}
CALLING = "function_call"  # a role of LLaMA-Factory, whose value is JSON of a call or of several
COUNTING = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # of a message: 0 or 1, false or true
READ = {"role", "from", "content", "value", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
READ |= {*REASONING_FIELDS, *COUNTING}
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "this model reads only text")
_PREFERENCE = "answers are compared, which is another kind of training; give the better one alone"
_MASKED = "labels for parts of a text are given as token ids in an .npz file"
REFUSED = {  # fields of a record, with the reason
    **_MEDIA,
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output", "completions"), _PREFERENCE),
    **dict.fromkeys(
        ("kto_tag", "labels"), "a judgement of the answer is another kind of training; leave bad answers out"
    ),
    **dict.fromkeys(("input_ids", "segments", "assistant_masks", "completion_mask", "labels_mask"), _MASKED),
    "chat_template": "the model's own template is used; leave the field out",
}
REFUSED_OF_MESSAGE = {
    **_MEDIA,
    **dict.fromkeys(("train_detail", "training_detail"), _MASKED),
    "tool_responses": "write each result as a message of the role tool",
    "prefix": "a begun answer cannot be told from the rest; write the begin into the user's message",
}
FREE: tuple[Any, ...] = (None, "", [], {}, "auto", False)  # values that say nothing
USED = {"system", "system_prompt", "tools", "functions", "chat_template_kwargs", "parallel_tool_calls"}


class ToldConversation(NamedTuple):
    """Conversation of a record, in the format of chat templates. `counts` says for each message whether it is learnt; of a
    conversational pair, `told` is the number of messages of the prompt, else None."""

    messages: list[Message]
    counts: list[bool]
    tools: list[Message]
    variables: dict[str, Any]
    told: int | None = None


class ToldPair(NamedTuple):
    """Prompt and completion of a record, as texts."""

    prompt: str
    completion: str


NO_MESSAGES = f'messages are a list of 1 to {MAX_MESSAGES} objects with "role" and "content"; correct it'
Told = Union[ToldConversation, ToldPair, str]


def kind_of(fields: Mapping[str, Any]) -> Kind:
    """Return the names of the fields that make a record a sample. Raises UsageError if it is of no known kind."""
    for kind in KINDS:
        if kind <= fields.keys():
            return kind
    for name in fields.keys() & REFUSED.keys():
        _refuse(fields, {name: REFUSED[name]})
    lists = [name for name, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(fields) == len(lists) == 1:
        raise UsageError(f"its list {lists[0]!r} holds the records; save that list alone, as JSON lines")
    found = ", ".join(sorted(fields)) or "nothing"
    raise UsageError(
        f'has {found}; give "messages", "prompt" and "completion", or "text" (or "conversations", or "instruction" and "output")'
    )


def read_fields(fields: Mapping[str, Any], kind: Kind, passed_over: set[str]) -> Told:
    """Return the sample of a record of that kind, and add the names of fields without a meaning here to `passed_over`.

    Raises UsageError if a field has a meaning that cannot be honoured, or a wrong value.
    """
    _refuse(fields, REFUSED)
    if kind != TEXT:
        _refuse(fields, dict.fromkeys(("label",), "a judgement of the answer: leave bad answers out"), (None, True))
    for name in ("weight", *COUNTING[1:]):
        if fields.get(name) not in (None, 1):
            raise UsageError(
                f'its "{name}" of {fields[name]!r} would weigh a whole record; leave the record or field out'
            )
    for name in ("tool_choice", "function_call"):
        _refuse(
            fields, {name: "a forced call cannot be told to the model; leave the field out"}, (None, "auto", "none")
        )
    if kind == TEXT:
        passed_over |= fields.keys() - kind
        return _text(fields, "text")
    if kind == PAIR and not isinstance(fields["prompt"], list) and not isinstance(fields["completion"], list):
        _refuse(fields, dict.fromkeys(("tools", "functions", "system"), "it needs a list of messages as prompt"))
        passed_over |= fields.keys() - kind - USED - {*COUNTING}
        return ToldPair(_text(fields, "prompt"), _text(fields, "completion"))
    used, told = kind, None
    if kind == ALPACA:
        used = kind | {"input", "history"}
        said = _alpaca(fields)
    elif kind == PAIR:
        prompt, completion = (
            _listed(fields[name], role) for name, role in (("prompt", USER), ("completion", ASSISTANT))
        )
        said, told = [*prompt, *completion], len(prompt)
    else:
        said = _listed(fields[next(iter(kind))])
        _refuse(fields, {"history": "it belongs to instruction and output; write it as messages"})
    system = fields.get("system") or fields.get("system_prompt")
    if system:
        if any(isinstance(message, dict) and SYSTEM in (message.get("role"), message.get("from")) for message in said):
            raise UsageError("has a system text in the record and in its messages; keep one of them")
        said = [{"role": SYSTEM, "content": system}, *said]
        told = None if told is None else told + 1
    if not 0 < len(said) <= MAX_MESSAGES:
        raise UsageError(NO_MESSAGES)
    passed_over |= fields.keys() - used - USED - {*COUNTING}
    messages, counts = _messages(said, passed_over)
    counts = counts if told is None else [place >= told for place in range(len(counts))]
    tools = [chat_tool(_unfolded(tool, "tools")) for tool in _tools(fields)]
    variables = _unfolded(fields.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise UsageError('its "chat_template_kwargs" are not an object; correct it')
    return ToldConversation(messages, counts, tools, variables, told)


def _refuse(fields: Mapping[str, Any], reasons: Mapping[str, str], free: Sequence[Any] = FREE) -> None:
    for name, reason in reasons.items():
        value = fields.get(name)
        if not any(value is one or (type(value) is type(one) and value == one) for one in free):
            raise UsageError(f'has "{name}": {reason}')


def _text(fields: Mapping[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        raise UsageError(f'its "{name}" is not text; write a string there')
    return text


def _unfolded(value: Any, name: str) -> Any:
    """Return the value of JSON text, as CSV files and some formats hold lists and objects; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise UsageError(f'its "{name}" is a text, but not JSON; write a list or JSON of it there') from None


def _tools(fields: Mapping[str, Any]) -> list[Any]:
    given = fields.get("tools") or fields.get("functions") or []
    tools = _unfolded(given, "tools") or []
    if not isinstance(tools, list):
        raise UsageError('its "tools" are not a list of JSON schemas; correct it')
    return tools


def _listed(value: Any, role: str = "") -> list[Any]:
    """Return a list of messages; with a `role`, a text alone is one message of that role if it is no JSON of a list."""
    if role and isinstance(value, str) and not value.lstrip().startswith("["):
        value = [{"role": role, "content": value}]
    try:
        listed = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        raise UsageError(NO_MESSAGES) from None
    if isinstance(listed, dict):
        listed = listed.get("messages")
    if not isinstance(listed, list):
        raise UsageError(NO_MESSAGES)
    return listed


def _alpaca(fields: Mapping[str, Any]) -> list[Any]:
    history = _unfolded(fields.get("history") or [], "history")
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise UsageError('its "history" is not a list of pairs of a prompt and an answer; correct it')
    asked = "\n".join(filter(None, (_text(fields, "instruction"), _text({"input": "", **fields}, "input"))))
    said: list[Any] = []
    for question, answer in [*history, (asked, _text(fields, "output"))]:
        said += [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]
    return said


def _messages(said: Sequence[Any], passed_over: set[str]) -> tuple[list[Message], list[bool]]:
    """Return messages in the format of chat templates, and which of them are learnt. Raises UsageError, with the number of the
    message from 1, if one is damaged or has a field that cannot be honoured."""
    given, counts = [], []
    for number, message in enumerate(said, 1):
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise UsageError(NO_MESSAGES)
        try:
            _refuse(message, REFUSED_OF_MESSAGE)
            passed_over |= {f"{name} of messages" for name in message.keys() - READ}
            plain = {
                **message,
                "role": SYNONYMS.get(role, role),
                "content": message.get("content", message.get("value")),
            }
            if role == CALLING:
                calls = _unfolded(plain["content"], "function_call")
                plain |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
            elif isinstance(plain.get("tool_calls"), str):
                plain["tool_calls"] = _unfolded(plain["tool_calls"] or "[]", "tool_calls")
            counts.append(_counts(message, plain["role"] == ASSISTANT))
            (read,) = chat_messages([{**plain, "tool_call_id": None}])
            if plain.get("tool_call_id") is not None:
                read["tool_call_id"] = plain["tool_call_id"]
            given.append(read)
        except UsageError as error:
            raise UsageError(f"message {number}: {error}") from None
    return chat_messages(given), counts


def _counts(message: Mapping[str, Any], is_answer: bool) -> bool:
    """Return whether a message is learnt: an answer, unless a field says no. Raises UsageError for another value than 0 and 1."""
    counts = is_answer
    for name in COUNTING:
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1) or not isinstance(value, int | float):
            raise UsageError(f'its "{name}" is {value!r}; write 0 or 1')
        if value and not is_answer:
            raise UsageError(f'has "{name}", but only the assistant\'s answers are learnt; leave it out')
        counts = counts and bool(value)
    return counts
