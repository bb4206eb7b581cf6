"""Formats of training records: those of OpenAI, trl, Axolotl, LLaMA-Factory and Unsloth, as conversations, pairs and texts.

docs/training.md lists their fields. A field that changes what is learnt is honoured or refused; the rest is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

from swarmnode.data.conversation import (
    ASSISTANT,
    REASONING_FIELDS,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    USUAL,
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
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call", "tool_call"), ASSISTANT),
    **dict.fromkeys(("observation", "tool_response"), TOOL),
}
# roles of LLaMA-Factory and ms-swift, whose text is JSON of a call or of several
CALLING = ("function_call", "tool_call")
ROLE, CONTENT, CALLS = ("role", "from"), ("content", "value"), ("tool_calls", "function_call")  # names of the same
TOOLS, SYSTEMS = ("tools", "functions"), ("system", "system_prompt")
COUNTING = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # of a message: 0 or 1, false or true
READ = {"role", "from", "content", "value", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
READ |= {*REASONING_FIELDS, *COUNTING}
_MEDIA = dict.fromkeys(
    ("image", "images", "image_url", "image_urls", "video", "videos", "audio", "audios", "attachments"),
    "this model reads only text",
)
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
USED = {*SYSTEMS, *TOOLS, "chat_template_kwargs", "parallel_tool_calls"}
ONES = (None, 1, "1", "1.0", "true", "True")  # weights of a record that change nothing, also as text of a table's cell


class RecordConversation(NamedTuple):
    """Conversation of a record, in the format of chat templates. `counts` says for each message whether it is learnt; of a
    conversational pair, `prompt_messages` is the number of messages of the prompt, else None."""

    messages: list[Message]
    counts: list[bool]
    tools: list[Message]
    variables: dict[str, Any]
    prompt_messages: int | None = None


class RecordPair(NamedTuple):
    """Prompt and completion of a record, as texts."""

    prompt: str
    completion: str


NO_MESSAGES = f'messages are a list of 1 to {MAX_MESSAGES} objects with "role" and "content"; correct it'
RecordContent = Union[RecordConversation, RecordPair, str]


def kind_of(fields: Mapping[str, Any]) -> Kind:
    """Return the names of the fields that make a record a sample. Of several kinds the first one in KINDS counts whose fields are
    neither null nor empty lists. Raises UsageError if it is of no known kind."""
    full = {name for name, value in fields.items() if value is not None and value != []}
    for named in (full, fields.keys()):
        for kind in KINDS:
            if kind <= named:
                return kind
    for name in fields.keys() & REFUSED.keys():
        _refuse(fields, {name: REFUSED[name]})
    for name, value in fields.items():
        first = value[0] if isinstance(value, list) and value else None
        if _is_message(first):
            raise UsageError(f'its list {name!r} holds messages; name it "messages"')
        if isinstance(first, dict) and (len(fields) == 1 or any(kind <= first.keys() for kind in KINDS)):
            raise UsageError(f"its list {name!r} holds the records; save that list alone, as JSON lines")
    _refuse_spellings(fields, set().union(*KINDS))
    found = ", ".join(sorted(fields)) or "nothing"
    raise UsageError(
        f'has {found}; give "messages", "prompt" and "completion", or "text" (or "conversations", or "instruction" and "output")'
    )


def read_fields(fields: Mapping[str, Any], kind: Kind, passed_over: set[str]) -> RecordContent:
    """Return the sample of a record of that kind, and add the names of fields without a meaning here to `passed_over`.

    Raises UsageError if a field has a meaning that cannot be honoured, or a wrong value.
    """
    _check_record(fields, kind)
    if kind == TEXT:
        passed_over |= fields.keys() - kind
        return _text(fields, "text")
    if kind != PAIR or any(_holds_messages(fields[name]) for name in kind):
        return _conversation(fields, kind, passed_over)
    _refuse(fields, dict.fromkeys(("tools", "functions", "system"), "it needs a list of messages as prompt"))
    passed_over |= fields.keys() - kind - USED - {*COUNTING}
    return RecordPair(_text(fields, "prompt"), _text(fields, "completion"))


def _check_record(fields: Mapping[str, Any], kind: Kind) -> None:
    """Raise UsageError if a field of a record has a meaning that cannot be honoured, or is misspelt."""
    _refuse(fields, REFUSED)
    if kind != TEXT:
        _refuse(fields, {"label": "a judgement of the answer: leave bad answers out"}, (None, True, "True", "true"))
    _refuse_spellings(fields, {*USED, *COUNTING, *REFUSED})
    for name in ("weight", *COUNTING[1:]):
        if fields.get(name) not in ONES:
            raise UsageError(
                f'its "{name}" of {fields[name]!r} would weigh a whole record; leave the record or field out'
            )
    forced = "a forced call cannot be told to the model; leave the field out"
    _refuse(fields, dict.fromkeys(("tool_choice", "function_call"), forced), (None, "auto", "none"))


def _conversation(fields: Mapping[str, Any], kind: Kind, passed_over: set[str]) -> RecordConversation:
    """Return the conversation of a record of messages, of a conversational pair or of Alpaca's kind. Adds to `passed_over` and
    raises as `read_fields` does."""
    used, prompt_messages = kind, None
    if kind == ALPACA:
        used = kind | {"input", "history"}
        said = _alpaca(fields)
    elif kind == PAIR:
        prompt, completion = _listed(fields["prompt"], USER), _listed(fields["completion"], ASSISTANT)
        said, prompt_messages = [*prompt, *completion], len(prompt)
    else:
        (name,) = kind
        said = _listed(fields[name])
        if any(
            isinstance(one, list) or (isinstance(one, dict) and any(k <= one.keys() for k in KINDS)) for one in said
        ):
            raise UsageError(f"its list {name!r} holds records, not messages; save that list alone, as JSON lines")
        _refuse(fields, {"history": "it belongs to instruction and output; write it as messages"})
    system = _only_value(fields, SYSTEMS)
    if system:
        said = [{"role": SYSTEM, "content": system}, *said]
        prompt_messages = None if prompt_messages is None else prompt_messages + 1
    if not 0 < len(said) <= MAX_MESSAGES:
        raise UsageError(NO_MESSAGES)
    passed_over |= fields.keys() - used - USED - {*COUNTING}
    messages, counts = _messages(said, passed_over, first=0 if system else 1)
    if system and any(message["role"] == SYSTEM for message in messages[1:]):
        raise UsageError("has a system text in the record and in its messages; keep one of them")
    if prompt_messages is not None:
        answers = [place for place in range(prompt_messages, len(messages)) if messages[place]["role"] == ASSISTANT]
        if answers[:1] != [prompt_messages]:
            raise UsageError('its "completion" does not begin with an answer; put other messages into the prompt')
        if not all(counts[place] for place in answers):
            raise UsageError('an answer of its "completion" does not count; write the record as "messages"')
        counts = [place >= prompt_messages for place in range(len(counts))]
    tools = [chat_tool(_unfolded(tool, "tools")) for tool in _tools(fields)]
    variables = _unfolded(fields.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise UsageError('its "chat_template_kwargs" are not an object; correct it')
    return RecordConversation(messages, counts, tools, variables, prompt_messages)


def _refuse(fields: Mapping[str, Any], reasons: Mapping[str, str], free: Sequence[Any] = FREE) -> None:
    for name, reason in reasons.items():
        value = fields.get(name)
        if not any(value is one or (type(value) is type(one) and value == one) for one in free):
            raise UsageError(f'has "{name}": {reason}')


def _refuse_spellings(fields: Mapping[str, Any], names: set[str]) -> None:
    """Raise UsageError for a field whose name is one of `names` but for spaces and capital letters."""
    for name in fields.keys() - names:
        if (meant := name.strip().lower()) in names:
            raise UsageError(f"has {name!r}; write {meant!r}, or leave it out")


def _only_value(
    fields: Mapping[str, Any], names: Sequence[str], read: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return what `read` makes of a field that has several `names`; None if it is missing. An empty value counts only if there is
    no other. Raises UsageError if two values differ."""
    given = [read(fields[name]) for name in names if fields.get(name) is not None]
    full = [value for value in given if value not in ("", [], {})] or given
    if any(value != full[0] for value in full):
        told = " and ".join(f'"{name}"' for name in names if fields.get(name) is not None)
        raise UsageError(f"has {told}, which differ; keep one of them")
    return full[0] if full else None


def _role(role: Any) -> str:
    """Return the role in the words of chat templates, another one as it is. Raises UsageError if it is no text."""
    if not isinstance(role, str):
        raise UsageError(NO_MESSAGES)
    word = role.strip().lower()
    return SYNONYMS.get(word, word if word in USUAL else role)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(name), str) for name in ROLE)


def _holds_messages(value: Any) -> bool:
    """Return whether a value is a list, or JSON text of a list of messages."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return isinstance(value, list)
    try:
        listed = parse_json(value)
    except ValueError:
        return False
    return isinstance(listed, list) and bool(listed) and all(map(_is_message, listed))


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
    tools = _only_value(fields, TOOLS, lambda value: _unfolded(value or [], "tools")) or []
    if not isinstance(tools, list):
        raise UsageError('its "tools" are not a list of JSON schemas; correct it')
    return tools


def _listed(value: Any, role: str = "") -> list[Any]:
    """Return a list of messages; with a `role`, a text alone is one message of that role if it is no JSON of messages."""
    if role and isinstance(value, str) and not _holds_messages(value):
        value = [{"role": role, "content": value}]
    listed = _unfolded(value, "messages")
    if isinstance(listed, dict):
        listed = listed.get("messages")
    if not isinstance(listed, list):
        raise UsageError(NO_MESSAGES)
    return listed


def _alpaca(fields: Mapping[str, Any]) -> list[Any]:
    history = _unfolded(fields.get("history") or [], "history")
    if not isinstance(history, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in history
    ):
        raise UsageError('its "history" is not a list of pairs of a prompt and an answer; correct it')
    asked = "\n".join(
        filter(None, (_text(fields, "instruction"), _text({"input": fields.get("input") or ""}, "input")))
    )
    said: list[Any] = []
    for question, answer in [*history, (asked, _text(fields, "output"))]:
        said += [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]
    return said


def _messages(said: Sequence[Any], passed_over: set[str], first: int) -> tuple[list[Message], list[bool]]:
    """Return messages in the format of chat templates, and which of them are learnt. Raises UsageError, with the number of the
    message, where the first one is number `first`, if one is damaged or has a field that cannot be honoured."""
    messages, counts = [], []
    for number, message in enumerate(said, first):
        try:
            role = _only_value(message, ROLE, _role) if isinstance(message, dict) else None
            if role is None:
                raise UsageError(NO_MESSAGES)
            _refuse(message, REFUSED_OF_MESSAGE)
            _refuse_spellings(message, {*READ, *REFUSED_OF_MESSAGE})
            passed_over |= {f"{name} of messages" for name in message.keys() - READ}
            content, calls = _only_value(message, CONTENT), _only_value(message, CALLS, _calls)
            if any(str(message.get(name)).strip().lower() in CALLING for name in ROLE):
                content, calls = None, _calls(content)
            if calls and role != ASSISTANT:
                raise UsageError(f"has a call, but its role is {role}; only the assistant calls functions")
            _only_value(message, REASONING_FIELDS)
            answered = message.get("tool_call_id")
            plain = {**message, "role": role, "content": content, "tool_calls": calls, "tool_call_id": None}
            counts.append(_counts(message, role == ASSISTANT))
            (read,) = chat_messages([plain])
            messages.append(read if answered is None else {**read, "tool_call_id": str(answered)})
        except UsageError as error:
            raise UsageError(f"{f'message {number}' if number else 'its system text'}: {error}") from None
    return chat_messages(messages), counts


def _calls(value: Any) -> list[Any]:
    """Return a list of calls from one or several, as objects or JSON text; empty for an empty text."""
    calls = _unfolded(value or [], "tool_calls")
    return [_unfolded(call, "tool_calls") for call in (calls if isinstance(calls, list) else [calls])]


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
