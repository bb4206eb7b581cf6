"""Each adapter of a swarm is a model of its own: listed with its parent, asked by its name, and never mistaken for another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from swarmnode.client.tokenizer import Turn
from swarmnode.compute.model.adapters.adapter_file import chat_of
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.founding.swarm_creation import from_folders
from swarmnode.gateway.gateway import ADAPTERS_S
from swarmnode.swarm.records.adapter_record import DAY_S, Share
from swarmnode.swarm.storage.own_adapters import AdapterTerms, OwnAdapters
from swarmnode.weights.adapter_files import LIST_S, SWEEP_S
from tests.adapters import save_llama_adapter
from tests.gateway.conftest import MODEL, serving
from tests.gateway.speaking import TEMPLATE, save_speaking_llama
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded

NAMES = ("verse", "prose")
SAID = [{"role": "user", "content": "How are the hens?"}]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A swarm whose model speaks, and speaks otherwise through each of two adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    save_speaking_llama(folder / "model")
    save_llama_adapter(folder / "rhyme", folder / "model", seed=2)
    saved = {name: save_llama_adapter(folder / name, folder / "model", seed=at) for at, name in enumerate(NAMES)}
    for name in ("prose", "rhyme"):
        save_template(folder / name, folder / "model", name)
    source = from_checkpoint(str(folder / "model"), folder / "none")
    (folder / "founded").mkdir()
    return Founded.on(folder / "model", folder / "founded", adapters=from_folders(saved, source, folder / "adapters"))


def save_template(folder: Path, model: Path, name: str) -> None:
    """Save the model's tokenizer beside an adapter, with a chat template of its own, as tools that train adapters do."""
    theirs = AutoTokenizer.from_pretrained(model)
    theirs.chat_template = f"<|system|>{name}" + TEMPLATE.replace("<|end|>", "<|tool|>")
    theirs.save_pretrained(folder)


def wanted_tokens(folder: Path) -> list[int]:
    theirs = AutoTokenizer.from_pretrained(folder)
    return list(theirs.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False))


@in_virtual_time
async def test_an_adapters_chats_are_written_by_its_own_template(adapted: Founded, tmp_path: Path) -> None:
    async with serving(adapted, tmp_path) as served, served.swarm.client() as friend:
        folders, end = adapted.file.parents[1], wanted_tokens(adapted.file.parents[1] / "prose")[-2]
        rhyme = folders / "rhyme"
        await served.client.adapters.add(rhyme, name="rhyme", share=Share.ALL, life_s=DAY_S)
        OwnAdapters(served.swarm.members["a"].home, adapted.swarm.id).add(
            rhyme,
            AdapterTerms("shared", Share.ALL, int(served.swarm.unix() + DAY_S), 4),
            chat_of(rhyme, folders / "model"),
        )
        await asyncio.sleep(LIST_S + ADAPTERS_S + SWEEP_S)
        for name, saved in {"verse": "model", "prose": "prose", "rhyme": "rhyme", "shared": "rhyme"}.items():
            asked = {"model": f"{MODEL}:{name}", "messages": SAID}
            wanted = wanted_tokens(folders / saved)
            assert (await served.http.post("/tokenize", json=asked)).json()["tokens"] == wanted, name
            chat = await served.http.post("/v1/chat/completions", json={**asked, "max_tokens": 4, "temperature": 0})
            told = await served.client.generate(wanted, max_new_tokens=4, adapter=name)
            assert chat.json()["choices"][0]["message"]["content"] == told.text
            assert chat.json()["usage"]["prompt_tokens"] == len(wanted)
            assert (end in await served.client.stop_ids(name)) == (name != "verse")
        for name in ("shared", str(rhyme), "prose"):
            theirs = await friend.chat_tokenizer(name)
            wanted = wanted_tokens(folders / ("prose" if name == "prose" else "rhyme"))
            assert theirs.encode_chat([Turn(**SAID[0])]) == wanted
            said = await friend.chat(SAID, max_tokens=4, adapter=name)
            assert said.ids == (await friend.generate(wanted, max_new_tokens=4, adapter=name)).ids


@in_virtual_time
async def test_each_is_listed_and_answers_by_its_name(adapted: Founded, tmp_path: Path) -> None:
    async with serving(adapted, tmp_path) as served:
        cards = {card.id: card.model_dump() for card in (await served.openai.models.list()).data}
        assert list(cards) == [MODEL, f"{MODEL}:verse", f"{MODEL}:prose"]
        assert [card["parent"] for card in cards.values()] == [None, MODEL, MODEL]
        assert (await served.openai.models.retrieve(f"{MODEL}:verse")).id == f"{MODEL}:verse"
        texts = {}
        for name in cards:
            options = {"prompt": "in the end", "max_tokens": 12, "temperature": 0}
            texts[name] = (await served.openai.completions.create(model=name, **options)).choices[0].text
            adapter = name.partition(":")[2]
            assert texts[name] == (await served.client.generate("in the end", max_new_tokens=12, adapter=adapter)).text
        assert len(set(texts.values())) == 3
        chats = [
            await served.openai.chat.completions.create(model=name, messages=SAID, max_tokens=8, temperature=0)
            for name in cards
        ]
        assert len({chat.choices[0].message.content for chat in chats}) == 3
        assert [chat.model for chat in chats] == list(cards)


@in_virtual_time
async def test_who_names_none_gets_the_model_alone(adapted: Founded, tmp_path: Path) -> None:
    async with serving(adapted, tmp_path) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "hens", "max_tokens": 4})
        assert answer.json()["model"] == MODEL
        with pytest.raises(openai.NotFoundError, match=f"{MODEL}:verse"):
            await served.openai.completions.create(model=f"{MODEL}:rhyme", prompt="hens")


@in_virtual_time
async def test_one_that_was_added_meanwhile_is_served_until_it_is_removed(adapted: Founded, tmp_path: Path) -> None:
    async with serving(adapted, tmp_path) as served:
        home, model = served.client._host.config.home, adapted.file.parents[1] / "rhyme"
        own = await served.client.adapters.add(model, name="rhyme", share=Share.PRIVATE, life_s=DAY_S)
        await asyncio.sleep(ADAPTERS_S + 1)
        options = {"prompt": "in the end", "max_tokens": 12, "temperature": 0}
        told = await served.openai.completions.create(model=f"{MODEL}:rhyme", **options)
        wanted = await served.client.generate("in the end", max_new_tokens=12, adapter=str(model))
        assert told.choices[0].text == wanted.text
        OwnAdapters(home, adapted.swarm.id).remove(own.terms.name)
        await asyncio.sleep(ADAPTERS_S + 1)
        with pytest.raises(openai.NotFoundError, match=f"{MODEL}:verse"):
            await served.openai.completions.create(model=f"{MODEL}:rhyme", **options)


@in_virtual_time
async def test_the_page_has_one_swarm_with_its_adapters(adapted: Founded, tmp_path: Path) -> None:
    async with serving(adapted, tmp_path) as served:
        assert served.page.names == [MODEL]
        assert (await served.http.get(f"/api/v1/swarms/{MODEL}")).json()["adapters"] == list(NAMES)
        assert not {f"{MODEL}:{name}" for name in NAMES} & {*(await served.http.get("/ready")).json()["loading"]}
        metrics = (await served.http.get("/metrics")).text
        lines = [line for line in metrics.splitlines() if line.startswith("swarmnode_client_sessions_total")]
        assert len(lines) == len(set(lines)), "one swarm is counted once"
