"""Training files are read as conversations are served: the same tokens as the gateway's, and labels on the answers alone."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.data import conversation
from swarmnode.data.conversation import GREETING, ChatEnding, ConfinedRenderer, render_chat
from swarmnode.data.samples import TokenSample, read_samples
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.gateway.openai.requests import ChatRequest
from tests.client.test_kept_tokenizer import byte_level
from tests.watch import Watch

BEGIN = "{% if add_generation_prompt %}<a>{% endif %}"
CONTENT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>\n{% endfor %}" + BEGIN
NATIVE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role[0] }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
    "{% endfor %}{% endfor %}</s>\n{% endfor %}" + BEGIN
)
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}" + BEGIN
)
TEMPLATES = {
    "roles and contents": CONTENT,
    "tools, calls and reasoning": NATIVE,
    "marks": MARKED,
    "tools without calls": "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}" + CONTENT,
    "no system role": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CONTENT,
    "system at the beginning alone": CONTENT.replace("in messages", "in messages if m.role != 'system' or loop.first"),
    "roles that alternate": (
        "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CONTENT
    ),
    "forgets earlier reasoning": NATIVE.replace("if m.reasoning_content", "if m.reasoning_content and loop.last"),
    "ends by the next role": "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}" + BEGIN,
}
FUNCTION = {
    "description": 'Tell the "rain".',
    "name": "rain",
    "parameters": {"type": "object", "properties": {"ü": {}}},
}
ARGUMENTS = {"where": "Zürich", "days": 2}


def conversations(count: int = 60) -> list[dict[str, Any]]:
    """Conversations of every shape that clients of OpenAI's API send, drawn by a fixed seed."""
    draw = random.Random(7)
    made = []
    for number in range(count):
        messages: list[dict[str, Any]] = []
        if draw.random() < 0.5:
            messages.append({"role": draw.choice(["system", "developer"]), "content": said(draw, "be short")})
        for turn in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": said(draw, f"ask {turn} ü")})
            if draw.random() < 0.2:
                messages[-1]["name"] = "Ann"
            if draw.random() < 0.4:
                call = {"id": f"call0000{turn}", "type": "function"}
                call["function"] = {"name": "rain", "arguments": json.dumps(ARGUMENTS)}
                messages.append({"role": "assistant", "content": draw.choice([None, "", "wait"]), "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said(draw, "wet")})
            if turn and draw.random() < 0.2:
                messages.append({"role": "system", "content": "now rhyme"})
            messages.append({"role": "assistant", "content": said(draw, f"answer {turn}")})
            if draw.random() < 0.2:
                messages[-1]["reasoning_content"] = "so"
        tools = [{"type": "function", "function": FUNCTION}] if draw.random() < 0.5 or not number else []
        made.append({"messages": messages, **({"tools": tools} if tools else {})})
    return made


def said(draw: random.Random, text: str) -> Any:
    parts = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
    return draw.choice([text, text, parts])


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    byte_level(chat_template=TEMPLATES[request.param]).save_pretrained(folder)
    return Tokenizer(folder)


def served(tokenizer: Tokenizer, record: dict[str, Any], ending: ChatEnding) -> list[int] | str:
    """What the gateway gives the model for a request with these messages and tools; the error's text if it refuses them."""
    try:
        asked = ChatRequest.model_validate(record)
        return tokenizer.renderer.encode(asked.conversation(), asked.tool_use.offered, asked.template_variables, ending)
    except (ApiError, CheckpointError) as error:
        return str(error)


def trained(tokenizer: Tokenizer, record: dict[str, Any], folder: Path) -> list[TokenSample] | str:
    path = folder / "data.jsonl"
    path.write_text(json.dumps(record))
    try:
        return list(read_samples(path, tokenizer))
    except UsageError as error:
        return str(error)


def as_objects(record: dict[str, Any]) -> dict[str, Any]:
    """The record with arguments as objects and tools as JSON text."""
    told = json.loads(json.dumps(record))
    for call in itertools.chain.from_iterable(message.get("tool_calls", ()) for message in told["messages"]):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {**told, "tools": json.dumps(told.get("tools", []))}


def test_data_has_the_tokens_of_the_gateway(tokenizer: Tokenizer, tmp_path: Path) -> None:
    compared = 0
    for record in conversations():
        whole = served(tokenizer, record, ChatEnding.CLOSED)
        samples = trained(tokenizer, record, tmp_path)
        if isinstance(samples, str):
            assert isinstance(whole, str) or "shows no reasoning" in samples, samples
            continue
        assert trained(tokenizer, as_objects(record), tmp_path) == samples
        assert samples[-1].tokens == whole
        answers = [place for place, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        learnt = [label_text(tokenizer, sample) for sample in samples]
        for place in answers:
            before = served(tokenizer, {**record, "messages": record["messages"][:place]}, ChatEnding.ANSWER)
            assert any(sample.tokens[: len(before)] == before for sample in samples), "a prompt as it is served"
            assert not all(
                sample.counts[len(before)] is False for sample in samples if len(sample.tokens) > len(before)
            )
        for message in record["messages"]:
            text = message["content"]
            text = text if isinstance(text, str) else "".join(part["text"] for part in text or ())
            assert not text or (text in "".join(learnt)) == (message["role"] == "assistant")
        compared += 1
    assert compared > 10


def label_text(tokenizer: Tokenizer, sample: TokenSample) -> str:
    return tokenizer.decode([id for id, counts in zip(*sample, strict=True) if counts], special_tokens=True)


def test_a_template_that_shows_all_gets_what_transformers_gives_it(tmp_path: Path) -> None:
    own = byte_level(chat_template=NATIVE)
    own.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    for record in conversations():
        told = as_objects(record)
        for message in told["messages"]:
            message["role"] = message["role"].replace("developer", "system")
            text = message["content"]
            message["content"] = text if isinstance(text, str) else "".join(part["text"] for part in text or ())
        theirs = own.apply_chat_template(told["messages"], tools=record.get("tools"), return_dict=False)
        assert served(tokenizer, record, ChatEnding.CLOSED) == list(theirs)


OVERRUNS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubles": "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "multiplies": "{{ ('ab' * 99999999999) | length }}",
    "fills": "{{ 'a' | center(9999999999) }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "long": "{% for a in range(9999) %}{{ 'abcdefghij' * 9999 }}{% endfor %}",
}


def test_templates_of_others_end_soon_and_others_are_written_meanwhile() -> None:
    confined = ConfinedRenderer(processor_s=0.3)
    honest, said = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ end }}{% endfor %}",
        [{**GREETING, "content": "hé"}],
    )
    try:
        for name, template in OVERRUNS.items():
            with pytest.raises(ValueError, match=r"more time or memory|MemoryError|too large"):
                confined.render(template, said, [], {})
            assert (
                confined.render(honest, said, [], {"end": "."})
                == "<user>hé."
                == render_chat(honest, said, [], {"end": "."})
            ), name
        process = confined._process
        for template, error in {
            "{{ raise_exception('who?') }}": "who",
            "{% for %}": "expression",
            "{{ x() }}": "undefined",
        }.items():
            with pytest.raises(ValueError, match=error):
                confined.render(template, said, [], {})
        assert confined._process is process, "an error of a template ends no process"
        with pytest.raises(ValueError, match="more time or memory"):
            confined.render(OVERRUNS["loops"], said, [], {})
    finally:
        confined.close()
    assert process is not None and process.poll() is not None


def test_a_template_is_not_given_up_for_a_long_conversation() -> None:
    confined = ConfinedRenderer(processor_s=0.3)
    honest = "{% for m in messages %}{% for n in messages %}{% endfor %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    long = [{"role": "user", "content": ""}] * 100_000  # 10^10 rounds overrun the time on any machine
    try:
        with pytest.raises(ValueError, match="more time or memory"):
            confined.render(honest, long, [], {})
        assert confined.render(honest, [GREETING], [], {}) == "<user>hi"
    finally:
        confined.close()


def test_slow_templates_get_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "SLOW_S", 0.01)  # a twentieth of what the slow ones take, or less
    watch = Watch(10.0)
    confined = ConfinedRenderer(processor_s=60.0, clock=watch)
    slow = [f"{{% for a in range(600) %}}{{% for b in range(9999) %}}{{% endfor %}}{{% endfor %}}{n}" for n in range(2)]
    try:
        for template in slow:
            assert confined.render(template, [GREETING], [], {}) == template[-1], "each gets a first chance"
        for template in slow:
            with pytest.raises(ValueError, match="it is slow, and other chats wait meanwhile: try again in"):
                confined.render(template, [GREETING], [], {})
        assert confined.render("{{ messages[0].content }}", [GREETING], [], {}) == "hi"
        watch.now_s += 3600.0
        assert confined.render(slow[0], [GREETING], [], {}) == "0"
        with pytest.raises(ValueError, match="it is slow"):
            confined.render(slow[1], [GREETING], [], {})
    finally:
        confined.close()
