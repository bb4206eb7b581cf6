"""Labels are on the assistant's answers, found by the template's marks or by what an answer adds to a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.data.conversation import ChatEnding
from swarmnode.data.samples import LearntTokens, TokenSample, read_samples
from swarmnode.errors import UsageError
from tests.client.test_kept_tokenizer import byte_level

PLAIN = """{% for tool in tools or [] %}T{{ tool.function.name }} {% endfor %}{% for m in messages %}<{{ m.role[0] }}>\
{{ m.content }}<s>
{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""
MARKED = """{% for m in messages %}<{{ m.role[0] }}>\
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<s>{% endgeneration %}
{% else %}{{ m.content }}<s>
{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""
FORGETS = """{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' and loop.last %}(thinks){% endif %}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """template -> a tokenizer of bytes that has it."""

    def make(template: str | None) -> Tokenizer:
        own = byte_level()
        own.chat_template = template
        own.save_pretrained(tmp_path / "tokenizer")
        return Tokenizer(tmp_path / "tokenizer")

    return make


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learnt(tokenizer: Tokenizer, sample: TokenSample) -> str:
    kept = [token for token, counts in zip(*sample, strict=True) if counts]
    return tokenizer.decode(kept, special_tokens=True)


@pytest.mark.parametrize(("template", "after"), [(PLAIN, "\n"), (MARKED, "")])
def test_answers_alone_are_learnt(tokenizer: Any, tmp_path: Path, template: str, after: str) -> None:
    own = tokenizer(template)
    path = written(tmp_path, {"messages": TALK})
    (sample,) = read_samples(path, own)
    assert learnt(own, sample) == f"hello<s>{after}so long<s>{after}"
    assert sample.tokens == own.renderer.encode(TALK, ending=ChatEnding.CLOSED)
    (whole,) = read_samples(path, own, LearntTokens.ALL)
    assert whole.tokens == sample.tokens and all(whole.counts)


def test_tools_are_in_the_conversation(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    (sample,) = read_samples(written(tmp_path, {"messages": TALK[:2], "tools": [{"name": "rain"}]}), own)
    assert own.decode(sample.tokens, special_tokens=True).startswith("Train <u>hi")
    assert learnt(own, sample) == "hello<s>\n"


def test_a_template_that_forgets_gives_a_sample_for_each_answer(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(FORGETS)
    first, second = read_samples(written(tmp_path, {"messages": TALK}), own)
    assert learnt(own, first) == "(thinks)hello\n" and learnt(own, second) == "(thinks)so long\n"
    assert own.decode(second.tokens).startswith("<u>hi\n<a>hello\n<u>bye")


def test_of_a_pair_the_completion_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    texts = {"prompt": "2 + 2 =", "completion": " 4"}
    talk = {"prompt": TALK[:3], "completion": TALK[3:]}
    (sample,) = read_samples(written(tmp_path, texts), own)
    end = own.decode([own.separator], special_tokens=True)
    assert learnt(own, sample) == f" 4{end}" and sample.tokens.count(own.separator) == 1
    (sample,) = read_samples(written(tmp_path, talk), own)
    assert learnt(own, sample) == "so long<s>\n"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"messages": TALK}, {"prompt": "a", "completion": "b"}], "line 2: has completion and prompt, but the first"),
        ([{"messages": TALK}, {"messages": "hi"}], "line 2: messages are a list"),
        ([{"messages": [{"content": "hi"}]}], "line 1: messages are a list"),
        ([{"messages": TALK[:1]}], "line 1: no token in it counts"),
        ([{"messages": TALK, "tools": 3}], "line 1: its .tools. are not a list"),
        ([{"prompt": "a", "completion": 3}], "line 1: its .completion. is not text"),
        ([{"question": "?"}], "line 1: has question; give .messages."),
    ],
)
def test_a_record_that_gives_no_sample_is_named(
    tokenizer: Any, tmp_path: Path, rows: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        list(read_samples(written(tmp_path, *rows), tokenizer(PLAIN)))


def test_without_a_template_there_are_no_conversations(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: the model has no chat template"):
        list(read_samples(written(tmp_path, {"messages": TALK}), tokenizer(None)))
