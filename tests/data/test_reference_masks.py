"""Labels of conversations beside trl's own masks, for the chat templates of real models that trl has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from swarmnode.client.tokenizer import Tokenizer
from swarmnode.data.conversation import ChatRenderer
from swarmnode.data.samples import TokenSample, read_samples
from tests.client.test_kept_tokenizer import byte_level

trl = pytest.importorskip("trl", reason="trl has the templates and their masks")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
OF_PARTS = {"idefics3", "llava_next", "smolvlm"}  # their templates show texts in lists of parts alone
ENDS_OTHERWISE = {"glm4moe", "gptoss"}  # the next role closes an answer; the last answer has an end of its own
TALK = [
    {"role": "user", "content": "How are the hens?"},
    {"role": "assistant", "content": "They are well."},
    {"role": "user", "content": "And the eggs?"},
    {"role": "assistant", "content": "Three of them."},
]
ANSWERS = [turn["content"] for turn in TALK[1::2]]


@pytest.fixture
def told(tmp_path: Path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}))

    def told(template: str) -> tuple[Tokenizer, list[TokenSample]]:
        byte_level(chat_template=template, pad_token="<pad>", unk_token="<s>").save_pretrained(tmp_path / "model")
        own = Tokenizer(tmp_path / "model")
        return own, list(read_samples(tmp_path / "talk.jsonl", own))

    return told


def learnt(own: Tokenizer, tokens: list[int], counts: list[bool]) -> str:
    return own.decode([token for token, does in zip(tokens, counts, strict=True) if does], special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learnt_is_what_trl_marks(told, name: str) -> None:
    own, (marked,) = told((FOLDER / f"{name}_training.jinja").read_text())
    talk = ChatRenderer(own).placed(TALK, [])[0]
    theirs = own.own.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert marked.tokens == list(theirs["input_ids"])
    assert marked.counts == list(map(bool, theirs["assistant_masks"]))
    marks = learnt(own, *marked)
    assert all(answer in marks for answer in ANSWERS)
    own, samples = told((FOLDER / f"{name}.jinja").read_text())
    found = [learnt(own, *sample) for sample in samples]
    whole = "".join(found)
    for turn in TALK:
        assert (turn["content"] in whole) == (turn["role"] == "assistant")
    if name not in ENDS_OTHERWISE:
        ends = re.match(r"\s*<[^>]*>|", marks.partition(ANSWERS[0])[2])[0]
        assert all(text.partition(answer)[2].startswith(ends) for text, answer in zip(found * 2, ANSWERS, strict=False))


def test_texts_in_parts_are_those_of_these_templates(told) -> None:
    of_parts = {name for name in NAMES if told((FOLDER / f"{name}.jinja").read_text())[0].renderer.needs_parts}
    assert of_parts == OF_PARTS
