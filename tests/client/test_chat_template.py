"""A kept tokenizer writes conversations as transformers does, and says the same of those that it cannot write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarmnode.client.model_files import TokenizerCache, is_ordinary, renders_as_transformers
from swarmnode.client.tokenizer import AdapterTokenizer
from swarmnode.compute.model.adapters.adapter_file import chat_of
from swarmnode.data import conversation
from swarmnode.data.conversation import PACKAGE
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.swarm.records.manifest import MAX_CHAT_BYTES
from swarmnode.swarm.storage.own_adapters import decode_chat
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
        changed.setattr(conversation, "RENDERER", "utils.moved")
        assert not renders_as_transformers(own)

    class Shouting(type(own)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return PreTrainedTokenizerBase.apply_chat_template(self, *args, **kwargs).upper()

    assert not renders_as_transformers(Shouting(tokenizer_object=own.backend_tokenizer, chat_template=CHATML))


SAVED = ("in a file", "in the config", "named", "another end", "no beginning")


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("template", [CHATML, LLAMA, TEMPLATES["all that it knows"]], ids=["chatml", "llama", "all"])
def test_an_adapters_template_writes_conversations_as_transformers_does(
    tmp_path: Path, template: str, saved: str
) -> None:
    byte_level(chat_template=CHATML, pad_token="<pad>").save_pretrained(tmp_path / "model")
    template = "{% if bos_token %}{{ bos_token }}{% endif %}" + template + "{{ eos_token }}"
    theirs = byte_level(chat_template=template, pad_token="<pad>")
    if saved == "another end":
        theirs.eos_token = "<think>"
    elif saved == "no beginning":
        theirs.bos_token = None
    theirs.save_pretrained(tmp_path / "verse")
    file, settings = tmp_path / "verse" / "chat_template.jinja", tmp_path / "verse" / "tokenizer_config.json"
    if saved in ("in the config", "named"):
        both = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools" + template}]
        chosen = template if saved == "in the config" else both
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": chosen}))
        file.unlink()
    whole = AutoTokenizer.from_pretrained(tmp_path / "verse")
    chat = chat_of(tmp_path / "verse", tmp_path / "model")
    assert chat is not None and decode_chat(chat.encode()) == chat
    cache = TokenizerCache(tmp_path)
    for base in (cache.tokenizer(SWARM, tmp_path / "model"), cache.tokenizer(SWARM, tmp_path / "model")):
        ours = AdapterTokenizer(base, chat)
        assert ours.ends[0] == whole.eos_token_id
        for messages in CONVERSATIONS.values():
            for tools in ((), (TOOL,)) if is_ordinary(messages) else ():
                found = written(ours, messages, tools)
                try:
                    wanted = whole.apply_chat_template(
                        messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=False
                    )
                except (TemplateError, TypeError) as error:
                    assert f"cannot be used: {error}" in str(found)
                else:
                    assert found == list(wanted)


def test_the_same_template_is_the_models_own(tmp_path: Path) -> None:
    byte_level(chat_template=CHATML).save_pretrained(tmp_path / "model")
    byte_level(chat_template=CHATML).save_pretrained(tmp_path / "verse")
    assert chat_of(tmp_path / "verse", tmp_path / "model") is None
    assert chat_of(tmp_path, tmp_path / "model") is None, "a folder of peft's two files alone"


@pytest.mark.parametrize("added", [["<|im_start|>"], ["<|im_start|>", "<|im_end|>"], ["[PAD]"], []], ids=str)
def test_tokens_that_the_model_lacks_are_refused_unless_they_pad(tmp_path: Path, added: list[str]) -> None:
    byte_level(chat_template=CHATML).save_pretrained(tmp_path / "model")
    theirs = byte_level(chat_template=CHATML)
    theirs.add_tokens(added, special_tokens=True)
    if "[PAD]" in added:
        theirs.pad_token = "[PAD]"
    theirs.save_pretrained(tmp_path / "verse")
    lacking = [token for token in added if token != "[PAD]"]
    if not lacking:
        assert chat_of(tmp_path / "verse", tmp_path / "model") is None
        return
    with pytest.raises(CheckpointError, match=rf"{len(lacking)} more tokens than the base \('<\|im_start\|>'"):
        chat_of(tmp_path / "verse", tmp_path / "model")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "cannot be used"),
        ("x" * MAX_CHAT_BYTES, "over 65,536"),
        ("x" * (MAX_CHAT_BYTES + 1), "over 65,536"),
    ],
)
def test_an_adapters_template_that_cannot_be_used_is_refused(tmp_path: Path, template: str, said: str) -> None:
    byte_level(chat_template=CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "verse").mkdir()
    (tmp_path / "verse" / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=said):
        chat_of(tmp_path / "verse", tmp_path / "model")
