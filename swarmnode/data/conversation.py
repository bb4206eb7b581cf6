"""Conversations: from the messages of clients and of training files to the tokens of a model's chat template.

Training, chats, the page and the HTTP API all write conversations by `ChatRenderer`, so a model learns the prompts that it gets.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from swarmnode.errors import CheckpointError, UsageError
from swarmnode.files import parse_json
from swarmnode.hollow_package import folders_of, put_hollow_package

Message = dict[str, Any]  # in the format of chat templates
Mappings = Sequence[Mapping[str, Any]]  # messages or tools
CheckText = Callable[[int], None]  # gets the number of a prompt's characters, and raises if they are too many
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = {"developer": SYSTEM, "function": TOOL}  # newer and older names of OpenAI's
USUAL = frozenset({SYSTEM, USER, ASSISTANT, TOOL})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING, REASONING_FIELDS = "reasoning_content", ("reasoning_content", "reasoning", "thinking")
PARAGRAPH = "\n\n"
GREETING: Message = {"role": USER, "content": "hi"}
REPLY: Message = {"role": ASSISTANT, "content": "hello"}
TRIALS = ("hens", "eggs")  # if a template shows the text, the ids of the two differ
TRIAL_ID = "abcdef123"  # Mistral's templates refuse ids of another length
BY_TEMPLATE = "template"
PACKAGE, RENDERER = "hollow_transformers", "utils.chat_template_utils"
CONFINED_S, MOST_WAIT_S = 2.0, 30.0
CONFINED_BYTES = 512 << 20
MOST_USUAL_BYTES = 64 << 10  # of a conversation that each template writes soon, whatever its client put into it
# processor time of a slow conversation, and share of the time that all slow templates get
SLOW_S, SLOW_SHARE = 0.2, 0.05
MAX_RENDERED_BYTES = 32 << 20
MAX_ERROR_CHARS = 1000
MAX_REMEMBERED = 256  # slow templates, and those that overran
MAX_ROLES, MAX_ROLE_CHARS = 8, 64  # of roles that only the model's template may know
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
RESULT_BEGIN, RESULT_END = "<tool_response>", "</tool_response>"
TOOLS = (
    "You may call functions to help with the user's request. These are their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write a JSON object with its name and its arguments, and nothing else:\n{CALL_BEGIN}\n"
    f'{{{{"name": <name>, "arguments": <arguments>}}}}\n{CALL_END}'
)


class ChatEnding(Enum):
    """Ending of a conversation: it begins an answer (ANSWER), continues the last message (CONTINUED) or closes it (CLOSED). The
    values are transformers' settings."""

    ANSWER = MappingProxyType({"add_generation_prompt": True})
    CONTINUED = MappingProxyType({"add_generation_prompt": False, "continue_final_message": True})
    CLOSED = MappingProxyType({"add_generation_prompt": False})


# -- messages and tools in the format of chat templates


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts; empty if it is None. Raises UsageError if it is
    neither, or a part is neither text nor a refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UsageError("the content of a message is neither a text nor a list of parts: write one of them")
    return "".join(part if isinstance(part, str) else _part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return str(part.get("refusal") or "")
    if kind is None:
        raise UsageError('a part of a message has no type: write {"type": "text", "text": …}')
    if kind not in TEXT_PARTS:
        raise UsageError(f"this model reads only text: leave out the part of type {kind!r}")
    if not isinstance(part.get("text"), str):
        raise UsageError(f"a part of type {kind!r} has no text: send its text in the field text")
    return str(part["text"])


def call_arguments(name: str, arguments: Any) -> Any:
    """Return the arguments of a call as values, from JSON text or values; an empty object for none. Raises UsageError if a text
    is not JSON."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        raise UsageError(f"the arguments of a call of {name} are not JSON: send them as the model wrote them") from None


def template_call(id: str, name: str, arguments: Any) -> Message:
    """Return an earlier tool call of the model in the format of chat templates: there `arguments` are values, not JSON text. An
    empty `id` is left out."""
    function = {"name": name, "arguments": arguments}
    return {**({"id": id} if id else {}), "type": "function", "function": function}


def chat_call(call: Any) -> Message:
    """Return a tool call in the format of chat templates; its function may be in `function` or stand by itself. Raises UsageError
    if it has no name, or its arguments are not JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError("a tool call has no function with a name: add it")
    name = function["name"]
    for other in ("parameters", "input", "args"):
        if function.get(other) and "arguments" not in function:
            raise UsageError(f'the arguments of a call of {name} are in "{other}": write them in "arguments"')
    return template_call(str(call.get("id") or ""), name, call_arguments(name, function.get("arguments")))


def chat_message(message: Mapping[str, Any]) -> Message:
    """Return a message in the format of chat templates: its role, one text, and perhaps calls, reasoning, a name and the id of
    the call that it answers. Fields of None count as missing; others are left out.

    Raises UsageError if a part is not text, a call is damaged, or the content is missing and the role is not assistant.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise UsageError('a message has no "role": write system, user, assistant or tool there')
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and role == ASSISTANT:
        content = message.get("refusal")
    if content is None and role != ASSISTANT:
        raise UsageError(f"a message of the role {role!r} has no content: send its text")
    told: Message = {"role": ROLES.get(role, role), "content": content_text(content)}
    if calls is None and message.get("function_call") is not None:
        calls = [message["function_call"]]
    if calls:
        if not isinstance(calls, list):
            raise UsageError("the tool_calls of a message are not a list: write one")
        told["tool_calls"] = list(map(chat_call, calls))
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning is not None:
        told[REASONING] = content_text(reasoning)
    return told | {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}


def chat_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation in the format of chat templates. Raises UsageError if a message is unsupported, or the id of a tool's
    result belongs to no earlier call."""
    told = list(map(chat_message, messages))
    check_results(told)
    return told


def check_results(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError if a message has a tool's result, but no earlier message has the call."""
    called: set[str] = set()
    for message in messages:
        called.update(call.get("id", "") for call in message.get("tool_calls", ()))
        answered = message.get("tool_call_id")
        if answered is not None and answered not in called:
            raise UsageError(
                f"the id {answered!r} of a tool's result belongs to no earlier call: send the message with the call, too"
            )


def chat_tool(tool: Any) -> Message:
    """Return a tool in the format of chat templates; its function may be in `function` or stand by itself. The order of the
    function's fields stays, because templates write them in that order. Raises UsageError if it has no name."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError("a tool has no function with a name: give its JSON schema, with a name")
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "type"}}


# -- rendering


def render_chat(template: str, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]) -> str:
    """Render a conversation by a chat template. `variables` are the template's further variables, among them special tokens and the
    ending. Raises the errors of transformers and jinja if the template cannot be used."""
    rendered, _ = _jinja().render_jinja_template(
        conversations=[list(messages)], tools=list(tools) or None, chat_template=template, **variables
    )
    return str(rendered[0])


def _jinja() -> Any:
    """Return transformers' module for chat templates, without importing the rest of transformers. Raises ImportError if this
    version has none."""
    inner = f"{PACKAGE}.utils"
    if inner not in sys.modules:
        folders = folders_of("transformers")
        put_hollow_package(PACKAGE, folders)
        put_hollow_package(inner, [f"{folder}/utils" for folder in folders])
    return importlib.import_module(f"{PACKAGE}.{RENDERER}")


def chosen_template(templates: str | Mapping[str, str] | None, *, with_tools: bool) -> str | None:
    """Return the template to use: of named templates "tool_use" if `with_tools` and it exists, else "default", or None
    if that does not exist. A single template, or None, is returned unchanged."""
    if not isinstance(templates, Mapping):
        return templates
    default = templates.get("default")
    return templates.get("tool_use", default) if with_tools else default


class ConfinedRenderer:
    """Renderer of chat templates of other members, in a process of its own with bounded memory and time: the sandbox of Jinja
    bounds neither. The process starts with the first conversation, and again after a template overran a bound. Chats with other
    adapters wait meanwhile, so all slow templates together get SLOW_SHARE of the time. Methods may be called from any thread."""

    def __init__(self, processor_s: float = CONFINED_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._processor_s = processor_s
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._overran: set[str] = set()
        self._slow: set[str] = set()
        self._slow_until_s = clock()  # before that no slow template is rendered

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def render(self, template: str, messages: Mappings, tools: Mappings, variables: Mapping[str, Any]) -> str:
        """Render a conversation as `render_chat` does. Raises ValueError if the template cannot be used, or needs more than
        CONFINED_S seconds of a processor, CONFINED_BYTES of memory or MAX_RENDERED_BYTES of text, or has done so before for a
        conversation of usual length, or is slow and must wait."""
        question = json.dumps([self._processor_s, template, list(messages), list(tools), dict(variables)]).encode()
        is_usual = len(question) - len(json.dumps(template)) <= MOST_USUAL_BYTES  # else the client may be at fault
        with self._lock:
            wait_s = self._slow_until_s - self._clock() if template in self._slow else 0.0
            if wait_s > 0:
                raise ValueError(f"it is slow, and other chats wait meanwhile: try again in {wait_s:.0f} s")
            answer = b"" if template in self._overran else self._answer(question)
            if not answer.endswith(b"\n"):
                self._end()
                if is_usual:
                    self._overran = _remembered(self._overran, template)
                raise ValueError("it needs more time or memory than a gateway gives to templates of other members")
            rendered, error, took_s = parse_json(answer)
            if is_usual and took_s > SLOW_S:
                self._slow = _remembered(self._slow, template)
                self._slow_until_s = self._clock() + took_s / SLOW_SHARE
        if error:
            raise ValueError(error)
        return str(rendered)

    def _answer(self, question: bytes) -> bytes:
        """Return the process's answer; what there is of it if the process ended or the answer is too long."""
        if self._process is None:
            entry = f"from {__name__} import render_confined; render_confined()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", entry],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],  # Python imports from the working directory first
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        # of a process that waits, or where processors' time is not bounded
        alarm = threading.Timer(MOST_WAIT_S, self._process.kill)
        alarm.start()
        try:
            stdin.write(question + b"\n")
            stdin.flush()
            return stdout.readline(MAX_RENDERED_BYTES)
        except OSError:
            return b""
        finally:
            alarm.cancel()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _remembered(templates: set[str], template: str) -> set[str]:
    return {*itertools.islice(templates - {template}, MAX_REMEMBERED - 1), template}


def render_confined() -> None:
    """Answer the questions of a ConfinedRenderer, one a line, until its process has ended."""
    _jinja()
    if sys.platform != "win32":  # there the asking process ends this one after MOST_WAIT_S
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (CONFINED_BYTES, CONFINED_BYTES))
        for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
            resource.setrlimit(kind, (0, 0))  # should the sandbox have a hole: no file is written, no process started
    for line in sys.stdin.buffer:
        processor_s, *conversation = json.loads(line)
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, processor_s)  # its signal ends the process; each question begins anew
        began_s = time.process_time()
        try:
            answer = render_chat(*conversation), ""
        except Exception as error:  # of the template: the asking process reports it
            answer = "", str(error)[:MAX_ERROR_CHARS] or type(error).__name__
        sys.stdout.write(json.dumps([*answer, time.process_time() - began_s]) + "\n")
        sys.stdout.flush()


class ChatTemplate(Protocol):
    """Interface to a chat template and its tokenizer (`client/tokenizer.py`)."""

    def encode_messages(
        self,
        messages: Mappings,
        tools: Mappings = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        ending: ChatEnding = ChatEnding.ANSWER,
        check_text: CheckText | None = None,
    ) -> list[int]:
        """Return the tokens that the template makes of messages and tools. Before it tokenizes the whole prompt, it calls
        `check_text` with its number of characters. Raises CheckpointError if the template cannot be used."""


class ChatRenderer:
    """Renderer of conversations by a chat template. Trials show what the template has places for; system texts, tools and calls
    without a place are put elsewhere."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._shows_calls: dict[bool, bool] = {}

    @functools.cached_property
    def shows_system(self) -> bool:
        """Whether the template shows a system text at the beginning."""
        return self._shows(lambda text: ([{"role": SYSTEM, "content": text}, GREETING], ()))

    @functools.cached_property
    def needs_parts(self) -> bool:
        """Whether the template shows texts only in a list of parts, as some of models for pictures do. Raises CheckpointError if it
        takes a message and shows its text in neither form."""
        if self._shows(lambda text: ([{"role": USER, "content": text}], ())):
            return False
        if self._shows(lambda text: (in_parts([{"role": USER, "content": text}]), ())):
            return True
        try:
            self._template.encode_messages([GREETING])
        except CheckpointError:
            return False  # it may need other messages at the beginning
        raise CheckpointError("the model's chat template shows no texts of messages")

    @functools.cached_property
    def shows_later_system(self) -> bool:
        """Whether the template shows a system text within a conversation."""
        return self._shows(lambda text: ([GREETING, REPLY, {"role": SYSTEM, "content": text}, GREETING], ()))

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows tools."""
        return self._shows(lambda text: ([GREETING], [_trial_tool(text)]))

    @functools.cached_property
    def reasoning_field(self) -> str | None:
        """Field of an answer whose text the template shows as reasoning; None if there is none."""
        for name in REASONING_FIELDS:

            def answered(text: str, name: str = name) -> tuple[list[Message], Sequence[Message]]:
                return [GREETING, {**REPLY, name: text}], ()

            if self._shows(answered, ChatEnding.CLOSED):
                return name
        return None

    def shows_calls(self, *, with_tools: bool) -> bool:
        """Return whether the template shows names, arguments and results of calls in a conversation with or without tools."""
        if with_tools not in self._shows_calls:
            tools = [_trial_tool("f")] if with_tools else []
            self._shows_calls[with_tools] = (
                self._shows(lambda text: (_trial_call(text, "x", "y"), tools))
                and self._shows(lambda text: (_trial_call("f", text, "y"), tools))
                and self._shows(lambda text: (_trial_call("f", "x", text), tools))
            )
        return self._shows_calls[with_tools]

    def _shows(
        self,
        conversation: Callable[[str], tuple[Sequence[Message], Sequence[Message]]],
        ending: ChatEnding = ChatEnding.ANSWER,
    ) -> bool:
        """Return whether the template shows a text in the messages and tools that `conversation` builds around it; False if the
        template cannot be used."""
        parts = "needs_parts" in self.__dict__ and self.needs_parts  # it is tried first, by texts as they are
        try:
            told = (conversation(text) for text in TRIALS)
            first, second = (
                self._template.encode_messages(in_parts(turns) if parts else turns, tools, ending=ending)
                for turns, tools in told
            )
        except CheckpointError:
            return False
        return first != second

    @property
    def system_place(self) -> str:
        """Place of system texts: "template", or "before the first user message"."""
        return BY_TEMPLATE if self.shows_system else "before the first user message"

    @property
    def tool_place(self) -> str:
        """Place of the tools' descriptions: the template's own, or a system text."""
        return BY_TEMPLATE if self.shows_tools else "as a system text"

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        ending: ChatEnding = ChatEnding.ANSWER,
        check_text: CheckText | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation: `messages` (see `chat_messages`), the `tools` on offer (see `chat_tool`), and
        further `variables` of the template. Before it tokenizes the whole prompt, it calls `check_text` with its number of
        characters. Raises CheckpointError if the template ignores a role or cannot be used."""
        placed = self.placed(messages, tools)
        return self._template.encode_messages(*placed, variables, ending=ending, check_text=check_text)

    def placed(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Return messages and tools for which the template has places. Raises CheckpointError if it ignores a role, or all
        texts."""
        turns, offered, parts = list(messages), list(tools), self.needs_parts
        self._check_roles(turns)
        calls = any(turn["role"] == TOOL or turn.get("tool_calls") for turn in turns)
        if (offered or calls) and not (self.shows_tools and self.shows_calls(with_tools=bool(offered))):
            turns = with_calls_as_text(turns)
        if offered and not self.shows_tools:
            listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offered)
            turns, offered = with_system(turns, TOOLS.format(tools=listed)), []
        systems = [place for place, turn in enumerate(turns) if turn["role"] == SYSTEM]
        if systems and not self.shows_system:
            turns = without_system(turns)
        elif systems and systems[-1] and not self.shows_later_system:
            turns = [*turns[:1], *without_system(turns[1:])] if systems[0] == 0 else without_system(turns)
        field = self.reasoning_field if any(REASONING in turn for turn in turns) else None
        if field is not None:
            turns = [{field if key == REASONING else key: value for key, value in turn.items()} for turn in turns]
        return in_parts(turns) if parts else turns, offered

    def _check_roles(self, turns: Sequence[Message]) -> None:
        unusual = {turn["role"] for turn in turns} - USUAL  # each is tried by three prompts
        if len(unusual) > MAX_ROLES or any(len(role) > MAX_ROLE_CHARS for role in unusual):
            raise CheckpointError(
                f"the messages have more than {MAX_ROLES} other roles than {', '.join(sorted(USUAL))}, or one of more than "
                f"{MAX_ROLE_CHARS} characters: use the usual ones"
            )
        for role in unusual:

            def said(text: str, role: str = role) -> tuple[list[Message], Sequence[Message]]:
                return [GREETING, {"role": role, "content": text}], ()

            self._template.encode_messages(*said(""))  # raises CheckpointError if the template refuses the role
            if not self._shows(said):
                raise CheckpointError(f"the model's chat template shows no messages of the role {role!r}")


def in_parts(turns: Iterable[Message]) -> list[Message]:
    """Return the conversation with each text as a list of one part."""
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


def without_system(turns: Sequence[Message]) -> list[Message]:
    """Return a conversation without system messages: their texts are put before the text of the next user message. If an answer
    comes first, they are put behind the user message before them, or become one."""
    result: list[Message] = []
    waiting: list[str] = []
    for turn in [*turns, None]:
        if turn is not None and turn["role"] == SYSTEM:
            waiting.append(turn["content"])
            continue
        if waiting and turn is not None and turn["role"] == USER:
            turn = {**turn, "content": PARAGRAPH.join([*waiting, turn["content"]])}
        elif waiting and result and result[-1]["role"] == USER:
            result[-1] = {**result[-1], "content": PARAGRAPH.join([result[-1]["content"], *waiting])}
        elif waiting:
            result.append({"role": USER, "content": PARAGRAPH.join(waiting)})
        waiting = []
        result += [] if turn is None else [turn]
    return result


def with_calls_as_text(turns: Sequence[Message]) -> list[Message]:
    """Return the conversation with tool calls written into the assistant's texts and their results into user messages. Consecutive
    results, and the user's message after them, become one message."""
    result: list[Message] = []
    answered = False  # the last message holds results
    for turn in turns:
        is_result = turn["role"] == TOOL
        if is_result:
            turn = {"role": USER, "content": f"{RESULT_BEGIN}\n{turn['content']}\n{RESULT_END}"}
        if calls := turn.get("tool_calls"):
            functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
            texts = [json.dumps(function, ensure_ascii=False) for function in functions]
            written = [f"{CALL_BEGIN}\n{text}\n{CALL_END}" for text in texts]
            kept = {key: value for key, value in turn.items() if key != "tool_calls"}
            turn = {**kept, "content": "\n".join(filter(None, [turn["content"], *written]))}
        if answered and turn["role"] == USER:
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{turn['content']}"}
        else:
            result.append(turn)
        answered = is_result
    return result


def with_system(turns: Sequence[Message], text: str) -> list[Message]:
    """Return the conversation with the system text `text` at its beginning, joined with the system text that is already there."""
    if turns and turns[0]["role"] == SYSTEM:
        return [{**turns[0], "content": PARAGRAPH.join([text, turns[0]["content"]])}, *turns[1:]]
    return [{"role": SYSTEM, "content": text}, *turns]


def _trial_tool(name: str) -> Message:
    function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def _trial_call(name: str, argument: str, result: str) -> list[Message]:
    called = {**REPLY, "content": "", "tool_calls": [template_call(TRIAL_ID, name, {"x": argument})]}
    return [GREETING, called, {"role": TOOL, "name": name, "content": result, "tool_call_id": TRIAL_ID}]
