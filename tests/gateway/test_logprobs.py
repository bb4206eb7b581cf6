"""Logprobs tell the bytes of every token, and those of a prompt are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.tokenizer import ByteTokenizer, Tokenizer
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.gateway.generation.choice_stream import TextSpeller, spell, spell_prompt
from tests.gateway.conftest import HALVES, MODEL, serving
from tests.gateway.speaking import save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

TEXT = "/v1/completions"
SAID = "hens é 😀 eggs"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_speaking_llama(folder)
    return Tokenizer(folder)


def test_a_token_has_its_bytes_also_in_the_middle_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SAID)
    assert b"".join(map(tokenizer.token_bytes, ids)) == SAID.encode()
    assert tokenizer.is_special(4) and not any(map(tokenizer.is_special, ids))
    alone = ByteTokenizer()
    assert b"".join(map(alone.token_bytes, alone.encode(SAID))) == SAID.encode()


def test_offsets_are_in_the_text_and_likely_parts_of_characters_are_told_apart(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SAID)
    parts = [token for token in ids if tokenizer.decode_token(token) == "�"]
    assert len(parts) == 6, "of two characters, two and four bytes long"
    others = [TokenLogprob(token, -1.0 - number) for number, token in enumerate(dict.fromkeys(parts))]
    told = TextSpeller().tell([spell(tokenizer, [TokenLogprob(token, -0.5), *others]) for token in ids], len(SAID))
    assert told is not None
    assert [len(likely or ()) for likely in told.top_logprobs] == [len(others)] * len(ids)
    assert told.tokens[ids.index(parts[0])] == f"bytes:\\x{'é'.encode()[0]:02x}"
    begins, rest = [], b""
    for token in ids:
        begins.append(len(rest.decode(errors="ignore")))
        rest += tokenizer.token_bytes(token)
    assert told.text_offset == begins
    cut = TextSpeller().tell([spell(tokenizer, [TokenLogprob(token, -0.5)]) for token in ids], 5)
    assert cut is not None and max(cut.text_offset) == 5, "a stop string has cut it there"


def test_a_first_token_follows_nothing_and_special_ones_are_not_in_the_text(tokenizer: Tokenizer) -> None:
    ids = [2, *tokenizer.encode("hens"), 4]
    told = TextSpeller().tell(spell_prompt(tokenizer, ids[0], [[TokenLogprob(token, -1.0)] for token in ids[1:]]), 4)
    assert told is not None
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None) and told.token_logprobs[1:] == [-1.0] * len(
        ids[1:]
    )
    assert told.text_offset[:2] == [0, 0] and told.text_offset[-1] == 4


@in_virtual_time
async def test_bytes_are_told_in_chats(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 3, "temperature": 2}
        told = (
            await served.http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 20})
        ).json()
        content = told["choices"][0]["logprobs"]["content"]
        text = b"".join(bytes(one["bytes"]) for one in content if not one["token"].startswith("<|"))
        assert text.decode(errors="replace") == told["choices"][0]["message"]["content"]
        assert all(
            len(one["top_logprobs"]) == 20 and set(one) == {"token", "logprob", "bytes", "top_logprobs"}
            for one in content
        )


def reference(folder: Path, ids: list[int]) -> Any:
    """Log-probabilities of what follows each position, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)


@in_virtual_time
async def test_an_echo_scores_a_prompt_as_transformers_does(founded: Founded, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_speaking_llama(model)
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        tokenizer = await served.client.tokenizer()
        text = SAID * 12  # more than goes at once
        ids = tokenizer.encode(text)
        logprobs = reference(model, ids)
        expected = [float(logprobs[position, token]) for position, token in enumerate(ids[1:])]
        for prompt, max_tokens in ((text, 0), (ids, 1), ([ids, ids[:9]], 1)):
            body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 2, "echo": True, "temperature": 0}
            told = (await served.http.post(TEXT, json=body)).json()
            choice = told["choices"][0]
            assert choice["text"].startswith(text) and (choice["text"] == text) == (max_tokens == 0)
            scores, likely = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            assert len(scores) == len(likely) == len(ids) + max_tokens and scores[0] is likely[0] is None
            assert max(abs(one - other) for one, other in zip(scores[1:], expected, strict=False)) < 1e-5
            for position, best in enumerate(likely[1 : len(ids)]):
                assert max(best.values()) == pytest.approx(float(logprobs[position].max()), abs=1e-5)
            assert told["usage"]["completion_tokens"] == max_tokens * len(told["choices"])
        assert len(told["choices"][1]["logprobs"]["tokens"]) == 10
        body |= {"prompt": text, "stream": True, "max_tokens": 3}
        events = (await served.http.post(TEXT, json=body)).text.split("data: ")[1:-1]
        pieces = [json.loads(event)["choices"][0] for event in events]
        whole = (await served.http.post(TEXT, json={**body, "stream": False})).json()["choices"][0]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [
            offset for piece in pieces if piece["logprobs"] for offset in piece["logprobs"]["text_offset"]
        ] == whole["logprobs"]["text_offset"]
        assert await served.freed()
        without = (await served.http.post(TEXT, json={"prompt": text, "max_tokens": 0, "echo": True})).json()[
            "choices"
        ][0]
        assert (without["text"], without["logprobs"], without["finish_reason"]) == (text, None, "length")


@in_virtual_time
async def test_logprobs_end_where_a_stop_string_ends_the_text(founded: Founded, tmp_path: Path) -> None:
    body: dict[str, Any] = {"max_tokens": 40, "seed": 3, "temperature": 2}
    async with serving(founded, tmp_path) as served:
        for path, asked in (
            (TEXT, {"prompt": "hi", "logprobs": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ):
            free = (await served.http.post(path, json={**body, **asked})).json()["choices"][0]
            text = free["text"] if path == TEXT else free["message"]["content"]
            for begin, end in ((0, 2), (3, 5), (len(text) // 2, len(text) // 2 + 3), (len(text) - 2, len(text))):
                stop = text[begin:end]
                stopped = {**body, **asked, "stop": stop}
                told = (await served.http.post(path, json=stopped)).json()["choices"][0]
                events = (await served.http.post(path, json={**stopped, "stream": True})).text.split("data: ")[1:-1]
                pieces = [json.loads(event)["choices"][0] for event in events]
                kept = text[: text.find(stop)]
                if path == TEXT:
                    tokens = told["logprobs"]["tokens"] if told["logprobs"] else []
                    streamed = [token for piece in pieces for token in (piece["logprobs"] or {}).get("tokens", ())]
                    expected = [
                        token
                        for token, offset in zip(
                            free["logprobs"]["tokens"], free["logprobs"]["text_offset"], strict=True
                        )
                        if offset < len(kept)
                    ]
                    assert (told["text"], tokens) == (kept, expected)
                else:
                    content = (told["logprobs"] or {"content": []})["content"]
                    tokens = [one["token"] for one in content]
                    streamed = [
                        one["token"] for piece in pieces for one in (piece["logprobs"] or {}).get("content", ())
                    ]
                    assert told["message"]["content"] == kept
                    said = b"".join(bytes(one["bytes"]) for one in content if not one["token"].startswith("<|"))
                    assert said.decode(errors="replace").startswith(kept) and (kept or not tokens)
                assert streamed == tokens


CHOICES = ["the hens lay eggs", "the hens lay stones", "the hens lay", "eggs lay hens in the shed"]


@in_virtual_time
async def test_a_multiple_choice_task_scores_as_with_transformers(founded: Founded, tmp_path: Path) -> None:
    """By the bodies that lm-evaluation-harness sends for `local-completions`, and as it reads what comes."""
    model = tmp_path / "model"
    save_speaking_llama(model)
    async with serving(founded, tmp_path, nodes=HALVES) as served:
        tokenizer = await served.client.tokenizer()
        context = tokenizer.encode("What do hens do? ")
        for ending in map(tokenizer.encode, CHOICES):
            body = {
                "model": MODEL,
                "prompt": [[*context, *ending]],
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
                "temperature": 0,
            }
            told = (await served.http.post(TEXT, json=body)).json()["choices"][0]["logprobs"]
            scores, likely = (told[field][len(context) : -1] for field in ("token_logprobs", "top_logprobs"))
            is_greedy = all(score == max(best.values()) for score, best in zip(scores, likely, strict=True))
            logprobs = reference(model, [*context, *ending])[len(context) - 1 : -1]
            own = [float(logprobs[position, token]) for position, token in enumerate(ending)]
            assert sum(scores) == pytest.approx(sum(own), rel=1e-6)
            assert is_greedy == all(int(best) == token for best, token in zip(logprobs.argmax(-1), ending, strict=True))
