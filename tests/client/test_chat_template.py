"""A kept tokenizer writes conversations as transformers does, and says the same of those that it cannot write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from swarmnode.client import model_files
from swarmnode.client.model_files import PACKAGE, TokenizerCache, is_ordinary, renders_as_transformers
from swarmnode.errors import CheckpointError, UsageError
from tests.client.test_kept_tokenizer import SWARM, byte_level

CHATML = """{%- if tools %}
{{ '<|tool|>' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- bos_token + message.role + '\\n' + (message.content or '') | trim }}
    {%- for call in message.tool_calls %}{{ call.function.arguments | tojson(indent=1) }}{% endfor %}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant {{ pad_token }}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
LLAMA = """{% set space = namespace(system='') %}{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}
{% endif %}{% for message in messages %}{% if message['role'] == 'system' %}{% set space.system = message['content'] %}
{% elif message['role'] == 'tool' %}{{ raise_exception('no tools here') }}
{% else %}{{ date_string }} {{ space.system }} {% generation %}{{ message['content'] }}{% endgeneration %}{% endif %}{% endfor %}"""
TEMPLATES: dict[str, str | dict[str, str]] = {
    "chatml": CHATML,
    "llama": LLAMA,
    "by name": {"default": LLAMA, "tool_use": CHATML},
    "without a default": {"tool_use": CHATML},
    "all that it knows": "{{ messages }} {{ tools }} {{ documents }} {{ add_generation_prompt }}",
    "out of the sandbox": "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}",
    "changes what it is given": "{% set _ = messages.append(1) %}",
    "broken": "{% for %}",
}
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": {"where": "héllo <b>"}}}
HELLO = {"role": "user", "content": "hello <s> world</s>"}
CONVERSATIONS: dict[str, list[Any]] = {
    "one turn": [HELLO],
    "a system's": [{"role": "system", "content": "  You rhyme.\n"}, HELLO],
    "a tool's": [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "no"}],
    "thoughts": [HELLO, {"role": "assistant", "content": "yes", "thinking": "so"}, HELLO, HELLO],
    "nothing said": [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "without content": [{"role": "user"}],
    "no turns": [],
    "of parts": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
}
VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False, "date_string": "1 May"},
    {"bos_token": "<think>"},
    {"conversations": 1},
    {"chat_template": "{{ 7 }}"},
    {"sanitize_control_tokens": True},
)


def written(tokenizer: Any, *conversation: Any) -> list[int] | str:
    try:
        return list(tokenizer.encode_messages(*conversation))
    except (CheckpointError, UsageError) as error:
        return str(error).replace(PACKAGE, "transformers")


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_written_as_transformers_does(tmp_path: Path, name: str) -> None:
    byte_level(chat_template=TEMPLATES[name], pad_token="<pad>").save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    made, kept = cache.tokenizer(SWARM, tmp_path / "model"), cache.tokenizer(SWARM, tmp_path / "model")
    for messages in CONVERSATIONS.values():
        for tools in ((), (TOOL,)):
            for variables in VARIABLES:
                assert written(kept, messages, tools, variables) == written(made, messages, tools, variables)


def test_only_odd_conversations_are_left_to_transformers() -> None:
    odd = {name for name, messages in CONVERSATIONS.items() if not is_ordinary(messages)}
    assert odd == {"nothing said", "no turns"}


def test_a_familys_own_way_and_a_module_that_is_gone_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = byte_level(chat_template=CHATML)
    assert renders_as_transformers(own)
    with monkeypatch.context() as changed:
        changed.setattr(model_files, "RENDERER", "utils.moved")
        assert not renders_as_transformers(own)

    class Shouting(type(own)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return PreTrainedTokenizerBase.apply_chat_template(self, *args, **kwargs).upper()

    assert not renders_as_transformers(Shouting(tokenizer_object=own.backend_tokenizer, chat_template=CHATML))
