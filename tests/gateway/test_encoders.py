"""Embeddings and classes through the gateway, by OpenAI's own client: as the model of one process gives them, and refusals."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from swarmnode.client.model_files import CachedTokenizer
from swarmnode.client.tokenizer import Tokenizer
from swarmnode.compute.capacity.capacity import graph_sizes
from swarmnode.compute.graph.costs.estimate import unit_weight_bytes
from swarmnode.compute.graph.graph import Graph
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.config import StageConfig
from swarmnode.errors import ContextTooLong
from swarmnode.founding.model_source import ModelSource, from_model, outline
from swarmnode.measuring.hardware import Hardware
from swarmnode.version import missing_package
from tests.contrib.script import load
from tests.encoders import LABELS, POSITIONS, save_encoder
from tests.gateway.conftest import MODEL, serving
from tests.gateway.test_examples import EXAMPLES
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm

TEXT, IDS = "the red cat sat", [1, 4, 12, 6, 8, 2]
LONG = "cat " * POSITIONS


def founded_on(source: ModelSource, folder: Path) -> Founded:
    async def found() -> Path:
        swarm = VirtualSwarm(folder)
        swarm.create(source)
        return swarm.file

    return Founded(asyncio.run(found()))


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Founded, Any, dict[str, str]]:
    """A swarm, its whole model, and two nodes' spans."""
    folder = tmp_path_factory.mktemp("embedding")
    whole = save_encoder(folder / "model", pooling="cls_token")
    source = from_model(str(folder / "model"), folder / "weights")
    assert source.model.task == "embed" and source.model.positions == POSITIONS - 4
    units = source.model.units
    return founded_on(source, folder), whole, {"a": "0:3", "b": f"3:{units}"}


@pytest.fixture(scope="module")
def classifying(tmp_path_factory: pytest.TempPathFactory) -> tuple[Founded, Any, dict[str, str]]:
    folder = tmp_path_factory.mktemp("classifying")
    whole = save_encoder(folder / "model", "roberta", classifies=True)
    source = from_model(str(folder / "model"), folder / "weights")
    assert source.model.task == "classify" and source.model.positions == POSITIONS - 1
    return founded_on(source, folder), whole, {"a": f"0:{source.model.units}"}


@in_virtual_time
async def test_embeddings_are_the_models(embedding: Any, tmp_path: Path) -> None:
    founded, whole, nodes = embedding
    with torch.no_grad():
        cls_H = whole(torch.tensor([IDS])).last_hidden_state[0, 0].numpy()
    async with serving(founded, tmp_path, nodes=nodes) as served:
        ask = served.openai.embeddings.create
        one = await ask(model=MODEL, input=TEXT)  # the client asks for base64 by itself
        np.testing.assert_allclose(one.data[0].embedding, cls_H, atol=1e-5)
        assert one.usage.prompt_tokens == one.usage.total_tokens == len(IDS)
        several = await ask(model=MODEL, input=[TEXT, "a blue dog ran", TEXT], encoding_format="float")
        assert [each.index for each in several.data] == [0, 1, 2]
        np.testing.assert_allclose(several.data[2].embedding, cls_H, atol=1e-5)
        by_ids = await ask(model=MODEL, input=[IDS], dimensions=len(cls_H))
        np.testing.assert_allclose(by_ids.data[0].embedding, cls_H, atol=1e-5)
        raw = await served.http.post("/v1/embeddings", json={"input": IDS, "encoding_format": "base64"})
        told = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(told, cls_H, atol=1e-5)
        many = await asyncio.gather(*(ask(model=MODEL, input=[TEXT] * 20) for _ in range(3)))
        assert all(len(answer.data) == 20 for answer in many)
        assert await load(EXAMPLES / "embeddings.py").nearest(served.openai, "a blue dog ran") == "a blue dog ran"


@in_virtual_time
async def test_embeddings_that_cannot_be(embedding: Any, tmp_path: Path) -> None:
    founded, _, nodes = embedding
    wrong = {
        f"the model takes {POSITIONS - 4}": {"input": LONG, "truncate": False},
        "vectors of 32 numbers": {"input": TEXT, "dimensions": 8},
        "not in the model's vocabulary": {"input": [[1, 99]]},
        "is negative": {"input": [-1]},
        "encoding_format": {"input": TEXT, "encoding_format": "hex"},
        "input": {"input": []},
        "at most 2048": {"input": ["a"] * 2049},
        "the prompt has no tokens": {"input": [[]]},
    }
    async with serving(founded, tmp_path, nodes=nodes) as served:
        for sentence, body in wrong.items():
            answer = await served.http.post("/v1/embeddings", json=body)
            assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text
        with pytest.raises(openai.BadRequestError, match="cannot classify"):
            await served.openai.post("http://localhost/classify", body={"input": TEXT}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="has no language model"):
            await served.openai.completions.create(model=MODEL, prompt=TEXT)
        with pytest.raises(openai.BadRequestError, match="has no language model"):
            await served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TEXT}])
        with pytest.raises(openai.NotFoundError):
            await served.openai.embeddings.create(model="other", input=TEXT)


@in_virtual_time
async def test_an_empty_text_is_answered_alike_alone_and_among_others(embedding: Any, tmp_path: Path) -> None:
    founded, _whole, nodes = embedding
    async with serving(founded, tmp_path, nodes=nodes) as served:
        alone = await served.openai.embeddings.create(model=MODEL, input="")
        among = await served.openai.embeddings.create(model=MODEL, input=["a", ""])
        np.testing.assert_allclose(alone.data[0].embedding, among.data[1].embedding, atol=1e-6)


@in_virtual_time
async def test_ids_that_stand_for_nothing_are_another_tokenizers(
    embedding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded, _, nodes = embedding
    async with serving(founded, tmp_path, nodes=nodes) as served:
        tokenizer = await served.client.tokenizer()
        assert tokenizer.unused(IDS) is None and tokenizer.unused([*IDS, 9999]) == 9999
        pieces = {4: "[unused4]", 12: "<unused12>", 6: "<|reserved_special_token_6|>", 8: ""}
        for token in pieces:
            for kind in (Tokenizer, CachedTokenizer):
                monkeypatch.setattr(kind, "_piece", lambda _self, one, at=token: pieces[at] if one == at else "x")
            answer = await served.http.post("/v1/embeddings", json={"input": IDS})
            sentence = answer.json()["error"]["message"]
            assert answer.status_code == 400 and f"token id {token} stands for nothing" in sentence
            assert "check_embedding_ctx_length=False" in sentence
        assert (await served.http.post("/v1/embeddings", json={"input": TEXT})).status_code == 200


@in_virtual_time
async def test_classes_are_the_models(classifying: Any, tmp_path: Path) -> None:
    founded, whole, nodes = classifying
    with torch.no_grad():
        probs_C = whole(torch.tensor([IDS])).logits[0].softmax(-1).numpy()
    async with serving(founded, tmp_path, nodes=nodes) as served:
        told = (await served.http.post("/classify", json={"model": MODEL, "input": [TEXT, "hens lay"]})).json()
        np.testing.assert_allclose(told["data"][0]["probs"], probs_C, atol=1e-5)
        assert told["data"][0]["label"] == LABELS[int(probs_C.argmax())]
        assert told["data"][0]["num_classes"] == len(LABELS) and told["usage"]["prompt_tokens"] == len(IDS) + 4
        (named,) = await served.client.classify([TEXT])
        assert named == pytest.approx(dict(zip(LABELS.values(), map(float, probs_C), strict=True)), abs=1e-5)
        assert (await served.http.post("/v1/embeddings", json={"input": TEXT})).status_code == 400


@in_virtual_time
async def test_agents_are_offered_what_the_model_is_for(embedding: Any, classifying: Any, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason=missing_package("mcp"))
    from mcp.server.mcpserver.exceptions import ToolError

    from swarmnode.gateway.integrations.swarm_tools import SwarmTools

    (embeds, _, halves), (classifies, _, whole) = embedding, classifying
    for folder in ("embeds", "classifies"):
        (tmp_path / folder).mkdir()
    async with serving(embeds, tmp_path / "embeds", nodes=halves) as served:
        tools = SwarmTools(served.client)
        assert {tool.name for tool in await tools.server("friends").list_tools()} == {"embed", "status"}
        (vector,) = (await tools.embed([TEXT]))["vectors"]
        assert vector == (await served.client.embed([TEXT]))[0].tolist()
        for texts in ([], [TEXT] * 65):
            with pytest.raises(ToolError, match=r"texts|tokens"):
                await tools.embed(texts)
    async with serving(classifies, tmp_path / "classifies", nodes=whole) as served:
        tools = SwarmTools(served.client)
        assert {tool.name for tool in await tools.server("friends").list_tools()} == {"classify", "status"}
        assert sum((await tools.classify([TEXT]))["classes"][0].values()) == pytest.approx(1.0)
        (card,) = (await served.openai.models.list()).data
        assert card.model_dump()["task"] == served.client.status()["task"] == "classify"


def test_what_an_encoder_will_be_is_known_before_its_weights_are_read(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", pooling="cls_token")
    graph, task = outline(str(tmp_path / "model"), tmp_path)
    source = from_model(str(tmp_path / "model"), tmp_path / "weights")
    assert isinstance(graph, Graph) and task == source.model.task and graph.units == source.model.units
    checkpoint = GraphCheckpoint(source.folder)
    assert unit_weight_bytes(graph) == graph_sizes(checkpoint).weight_bytes
    assert Hardware.probe(checkpoint, StageConfig(dtype="float32")).dtype is torch.float32  # as it computes


@in_virtual_time
async def test_a_language_model_embeds_nothing(founded: Founded, tmp_path: Path) -> None:
    async with serving(founded, tmp_path) as served:
        with pytest.raises(openai.BadRequestError, match="generates text: it cannot embed"):
            await served.openai.embeddings.create(model=MODEL, input=TEXT)


@in_virtual_time
async def test_long_texts_are_cut_where_the_request_says_so(embedding: Any, tmp_path: Path) -> None:
    founded, whole, nodes = embedding
    with torch.no_grad():
        cut_H = whole(torch.tensor([[1, 4, 12, 2]])).last_hidden_state[0, 0].numpy()  # [CLS] the red [SEP]
    async with serving(founded, tmp_path, nodes=nodes) as served:
        for body in ({"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4, "truncate": True}):
            told = (await served.http.post("/v1/embeddings", json={"input": TEXT, **body})).json()
            np.testing.assert_allclose(told["data"][0]["embedding"], cut_H, atol=1e-5)
            assert told["usage"]["prompt_tokens"] == 4
        for body in ({}, {"truncate_prompt_tokens": -1}, {"truncate": True}, {"truncate": "END"}):
            told = (await served.http.post("/v1/embeddings", json={"input": LONG, **body})).json()
            assert told["usage"]["prompt_tokens"] == POSITIONS - 4
        with torch.no_grad():
            cut_H = whole(torch.tensor([[1, *[IDS[3]] * (POSITIONS - 6), 2]])).last_hidden_state[0, 0].numpy()
        vector = (await served.http.post("/v1/embeddings", json={"input": LONG})).json()["data"][0]["embedding"]
        np.testing.assert_allclose(vector, cut_H, atol=1e-5)
        assert (await served.client.embed([LONG]))[0].tolist() == pytest.approx(vector, abs=1e-6)
        with pytest.raises(ContextTooLong):
            await served.client.embed([LONG], truncate=False)
        for body in ({"truncate": False}, {"truncate": "NONE"}):
            assert (await served.http.post("/v1/embeddings", json={"input": LONG, **body})).status_code == 400
        for body in ({"truncate": "START"}, {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 1}):
            answer = await served.http.post("/v1/embeddings", json={"input": TEXT, **body})
            assert answer.status_code == 400, answer.text


@in_virtual_time
async def test_documents_are_ranked_by_their_embeddings(embedding: Any, tmp_path: Path) -> None:
    founded, _, nodes = embedding
    body = {"query": TEXT, "documents": ["a blue dog ran", {"text": TEXT}, LONG], "top_n": 2, "return_documents": True}
    async with serving(founded, tmp_path, nodes=nodes) as served:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            told = (await served.http.post(path, json=body)).json()
            assert told["results"][0]["index"] == 1 and len(told["results"]) == 2
            assert told["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
            assert told["results"][0]["document"] == {"text": TEXT}
        wrong = {"query": "", "documents": ["a"]}, {"query": "a", "documents": []}, {"query": LONG, "documents": [[1]]}
        for each in wrong:
            assert (await served.http.post("/v1/rerank", json=each)).status_code == 400
        missing = await served.http.post("/v1/assistants", json={})
        assert missing.status_code == 404 and "/v1/chat/completions" in missing.json()["error"]["message"]


@in_virtual_time
async def test_documents_are_ranked_by_a_cross_encoder(
    classifying: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    whole = save_encoder(model, "roberta", classifies=True, labels=1)
    (tmp_path / "swarm").mkdir()
    source = await asyncio.to_thread(from_model, str(model), tmp_path / "weights")
    swarm = VirtualSwarm(tmp_path / "swarm")
    swarm.create(source)
    with torch.no_grad():
        pair = torch.tensor([[1, 4, 6, 2, 12, 8, 2]])  # [CLS] the cat [SEP] red sat [SEP]
        score = float(whole(pair).logits[0].sigmoid())
    (tmp_path / "served").mkdir()
    async with serving(Founded(swarm.file), tmp_path / "served", nodes={"a": f"0:{source.model.units}"}) as served:
        body = {"query": "the cat", "documents": ["hens lay", "red sat", LONG]}
        told = (await served.http.post("/v1/rerank", json=body)).json()
        (red,) = [each for each in told["results"] if each["index"] == 1]
        assert red["relevance_score"] == pytest.approx(score, abs=1e-5)
        scores = [each["relevance_score"] for each in told["results"]]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        refused = await served.http.post("/v1/rerank", json={**body, "query": LONG})
        assert refused.status_code == 400 and "no room" in refused.json()["error"]["message"]
        monkeypatch.setattr(Tokenizer, "encode_pair", lambda *_: ([1, 4, 2, 6, 2], True))
        marked = await served.http.post("/v1/rerank", json=body)
        assert marked.status_code == 400 and "segment ids" in marked.json()["error"]["message"]
    founded, _, nodes = classifying
    (tmp_path / "classes").mkdir()
    async with serving(founded, tmp_path / "classes", nodes=nodes) as served:
        answer = await served.http.post("/v1/rerank", json=body)
        assert answer.status_code == 400 and "3 classes" in answer.json()["error"]["message"]
