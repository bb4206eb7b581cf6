"""Labels are on the assistant's answers, found by the template's marks or by what an answer adds to a conversation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.data.conversation import ChatEnding
from swarmnode.data.formats import COUNTING
from swarmnode.data.samples import DataNotes, LearntTokens, TokenSample, read_samples, sample_kind, shown, with_ends
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
        ([{"messages": TALK}, {"messages": "hi"}], "line 2: its .messages. is a text, but not JSON"),
        ([{"messages": [{"content": "hi"}]}], "line 1: message 1: messages are a list"),
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


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [*TALK[:3], {**TALK[3], **fields}]}


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETS])
@pytest.mark.parametrize("field", COUNTING)
def test_an_answer_of_weight_0_does_not_count(tokenizer: Any, tmp_path: Path, template: str, field: str) -> None:
    own = tokenizer(template)
    for value, first, last in ((0, True, False), (False, True, False), (1, True, True), (None, True, True)):
        samples = list(read_samples(written(tmp_path, answered(**{field: value})), own))
        told = "".join(learnt(own, sample) for sample in samples)
        assert ("hello" in told, "so long" in told) == (first, last) and "bye" not in told


SAME = [
    {"conversations": [{"from": ("human", "gpt")[n % 2], "value": m["content"]} for n, m in enumerate(TALK)]},
    {"messages": [{**m, "timestamp": 3} for m in TALK], "source": "x"},
    {"instruction": "bye", "input": "", "output": "so long", "history": [["hi", "hello"]]},
    {"messages": json.dumps(TALK)},
    {"conversations": TALK, "tools": "[]", "weight": 1, "parallel_tool_calls": False},
]


def test_every_format_gives_the_same_sample(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    expected = list(read_samples(written(tmp_path, {"messages": TALK}), own))
    for record in SAME:
        notes = DataNotes()
        assert list(read_samples(written(tmp_path, record), own, notes=notes)) == expected
        assert notes.passed_over == ({"source", "timestamp of messages"} if "source" in record else set())
    called = {"from": "function_call", "value": '{"name": "rain", "arguments": {"in": "Bern"}}'}
    (sample,) = read_samples(written(tmp_path, {"conversations": [*SAME[0]["conversations"][:1], called]}), own)
    assert '{"name": "rain", "arguments": {"in": "Bern"}}' in learnt(own, sample)
    (sample,) = read_samples(written(tmp_path, {"messages": TALK, "system": "be short"}), own)
    assert own.decode(sample.tokens, special_tokens=True).startswith("<s>be short<s>")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (answered(weight=0.5), "message 4: its .weight. is 0.5; write 0 or 1"),
        (answered(weight="1"), "message 4: its .weight. is '1'"),
        (answered(training_detail=[{"begin_offset": 0}]), "has .training_detail."),
        ({"messages": [{**TALK[0], "train": True}, TALK[1]]}, "only the assistant's answers"),
        (
            {"messages": [{**TALK[0], "content": [{"type": "image_url"}]}, TALK[1]]},
            "message 1: this model reads only text",
        ),
        (
            {
                "messages": [
                    TALK[0],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "JSON",
        ),
        ({"messages": [{**m, "weight": 0} for m in TALK]}, "no token in it counts"),
        ({"messages": TALK, "chosen": "x"}, "answers are compared"),
        ({"conversations": [{"messages": TALK}]}, "holds records, not messages; save that list alone"),
        ({"conversations": [TALK, TALK]}, "holds records, not messages; save that list alone"),
        ({"messages": repr(TALK)}, "not JSON"),
        ({"messages": [{**TALK[0], "image_url": "x"}, TALK[1]]}, "message 1: has .image_url.: this model reads only"),
        (
            {"messages": [{**TALK[0], "content": [{"text": "x"}]}, TALK[1]]},
            "message 1: a part of a message has no type",
        ),
        ({"messages": [{"role": "developer", "content": "x"}, *TALK], "system": "y"}, "keep one of them"),
        ({"instruction": "a", "output": "b", "history": [["x", None]]}, "not a list of pairs"),
        ({"prompt": "a", "completion": "b", "label": False}, "judgement"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "answers are compared"),
        ({"messages": TALK, "weight": 0.3}, "would weigh a whole record"),
        ({"messages": TALK, "images": ["x.png"]}, "reads only text"),
        ({"messages": [{"role": "system", "content": "x"}, *TALK], "system": "y"}, "keep one of them"),
        ({"messages": TALK, "tools": "[{"}, "not JSON"),
        ({"segments": [{"label": True, "text": "x"}]}, "npz"),
        (answered(reasoning_content="so"), "shows no reasoning"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(tokenizer: Any, tmp_path: Path, record: Any, told: str) -> None:
    with pytest.raises(UsageError, match=f"line 1: .*{told}"):
        list(read_samples(written(tmp_path, record), tokenizer(PLAIN)))


NAMES = [  # of one thing, in a message, and two values
    (("role", "from"), "user", "system"),
    (("content", "value"), "hi", "hello"),
    (("reasoning", "thinking", "reasoning_content"), "a", "b"),
    (("tool_calls", "function_call"), {"name": "f"}, {"name": "g"}),
]
RECORD_NAMES = [(("tools", "functions"), [{"name": "f"}], [{"name": "g"}]), (("system", "system_prompt"), "a", "b")]


def test_two_names_of_one_thing_agree_or_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    for of_message, (names, one, other) in [(True, each) for each in NAMES] + [(False, each) for each in RECORD_NAMES]:
        for first, second in itertools.permutations(names, 2):
            place = 1 if "call" in first or "reasoning" in names else 0

            def record(own: dict[str, Any], kept: int = place, of_message: bool = of_message) -> dict[str, Any]:
                if not of_message:
                    return {"messages": TALK, **own}
                plain = {key: value for key, value in TALK[kept].items() if key not in own}
                return {"messages": [*TALK[:kept], {**plain, **own}, *TALK[kept + 1 :]]}

            with pytest.raises(UsageError, match=r"line 1: .*which differ; keep one"):
                list(read_samples(written(tmp_path, record({first: one, second: other})), own))
            if "reasoning" not in names:
                alone, *same = (
                    list(read_samples(written(tmp_path, record(told)), own))
                    for told in ({first: one}, {first: one, second: one}, {first: None, second: one}, {second: one})
                )
                assert all(found == alone for found in same)


@pytest.mark.parametrize("spell", [str.upper, str.title, "{} ".format])
def test_spellings_of_roles_are_read_and_those_of_fields_named(tokenizer: Any, tmp_path: Path, spell: Any) -> None:
    own = tokenizer(PLAIN)
    expected = list(read_samples(written(tmp_path, {"messages": TALK}), own))
    for names in (("user", "assistant"), ("human", "gpt")):
        told = [{"role": spell(names[place % 2]), "content": turn["content"]} for place, turn in enumerate(TALK)]
        assert list(read_samples(written(tmp_path, {"messages": told}), own)) == expected
    for record, name in (
        (answered(**{spell("weight"): 0}), "weight"),
        (answered(**{spell("tool_calls"): []}), "tool_calls"),
        ({"messages": TALK, spell("tools"): []}, "tools"),
        ({"messages": TALK, spell("chosen"): "x"}, "chosen"),
        ({spell("text"): "x"}, "text"),
    ):
        with pytest.raises(UsageError, match=f"line 1: .*write '{name}'"):
            list(read_samples(written(tmp_path, record), own))


CALL = {"name": "rain", "arguments": {"say": 'the "\\" of {x}\n'}}


def test_calls_in_every_form_are_the_same(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    nested = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    found = []
    for call in (CALL, nested, {"type": "function", "function": nested}, json.dumps(nested)):
        for value in (call, [call], json.dumps([call]), json.dumps(call) if isinstance(call, dict) else call):
            answers = [{"role": "assistant", "tool_calls": value}, {"role": "assistant", "function_call": value}]
            answers += [{"from": role, "value": value} for role in ("function_call", "tool_call")]
            for answer in answers:
                (sample,) = read_samples(written(tmp_path, {"messages": [TALK[0], answer]}), own)
                found.append(sample)
    assert all(sample == found[0] for sample in found) and json.dumps(CALL) in learnt(own, found[0])
    for record, told in (
        ({"messages": [{**TALK[0], "tool_calls": [CALL]}, TALK[1]]}, "its role is user"),
        (
            {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{"name": "f", "input": {"a": 1}}]}]},
            '"arguments"',
        ),
    ):
        with pytest.raises(UsageError, match=f"line 1: .*{told}"):
            list(read_samples(written(tmp_path, record), own))


def test_pairs_of_messages_as_json_text_are_no_braces(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    lists = {"prompt": TALK[:3], "completion": TALK[3:]}
    expected = list(read_samples(written(tmp_path, lists), own))
    for texts in (("prompt",), ("completion",), ("prompt", "completion")):
        record = {name: json.dumps(value) if name in texts else value for name, value in lists.items()}
        assert list(read_samples(written(tmp_path, record), own)) == expected
    (sample,) = read_samples(written(tmp_path, {"prompt": "[1, 2]", "completion": '[{"a": 1}]'}), own)
    assert learnt(own, sample).startswith('[{"a": 1}]')
    for completion, told in (
        (TALK[:1], "does not begin with an answer"),
        ([{**TALK[3], "weight": 0}], "does not count"),
    ):
        with pytest.raises(UsageError, match=f"line 1: .*{told}"):
            list(read_samples(written(tmp_path, {**lists, "completion": completion}), own))


def test_null_and_empty_fields_are_missing(tokenizer: Any, tmp_path: Path) -> None:
    own = tokenizer(PLAIN)
    for record in (
        {"messages": None, "conversations": TALK},
        {"messages": [], "conversations": TALK, "weight": "1"},
        {"instruction": "bye", "input": None, "output": "so long", "history": [["hi", "hello"]], "tools": ""},
        {
            "messages": [{"role": None, "from": turn["role"], "value": turn["content"]} for turn in TALK],
            "label": "True",
        },
    ):
        expected = list(read_samples(written(tmp_path, {"messages": TALK}), own))
        assert list(read_samples(written(tmp_path, record), own)) == expected


def test_the_end_of_an_answer_is_seen_and_can_be_taught(tokenizer: Any, tmp_path: Path) -> None:
    outside = MARKED.replace("<s>{% endgeneration %}", "{% endgeneration %}<s>")
    for template, teaches, ended in (
        (PLAIN, True, "so long<s>\n"),
        (outside, False, "so long<s>"),
        (FORGETS, False, None),
    ):
        own = tokenizer(template)
        path, stop = written(tmp_path, {"messages": TALK}), own.encode_document("<s>")[0]
        notes = DataNotes()
        assert list(with_ends(read_samples(path, own), [stop], None, notes)) == list(read_samples(path, own))
        assert notes.teaches_end == teaches
        samples = list(with_ends(read_samples(path, own), [stop], stop, notes))
        assert notes.teaches_end and learnt(own, samples[-1]).endswith(ended or "so long\n<s>")
        assert shown(samples[-1], own.decode).count("⟦") == (1 if template == FORGETS else 2)


def test_a_folder_of_samples_says_what_it_passes_over(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    own, notes = tokenizer(PLAIN), DataNotes()
    (tmp_path / "data" / "b.jsonl").write_text(json.dumps({"messages": TALK}))
    (tmp_path / "data" / "a.json").write_text(json.dumps([{"messages": TALK[:2]}]))
    for name, text in (("README.md", "hi"), ("info.json", '{"splits": 3}'), (".hidden", "x")):
        (tmp_path / "data" / name).write_text(text)
    assert sample_kind(tmp_path / "data") == {"messages"}
    assert len(list(read_samples(tmp_path / "data", own, notes=notes))) == 2
    assert notes.passed_over == {"README.md", "info.json"}
