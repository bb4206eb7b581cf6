"""Spans with adapters give what the whole model gives whose weights an adapter has changed: family by family, and mixed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from swarmnode.compute.model.adapters.adapter_file import AdapterFile, adapter_in
from swarmnode.compute.model.adapters.span_adapters import Lora, SpanAdapters
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.linear import FbgemmLinear, Packing
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.errors import CheckpointError, ErrorCode, ProtocolError
from swarmnode.ledger import Account, MemoryLedger
from tests.adapters import RANK, matrices, merge, with_magnitudes, write_adapter
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.compute.packing.test_packed_weight import dequantised, pack
from tests.numerics.families import tiny_config

TOLERANCE = 1e-4  # of the logits' standard deviation; float32, whose sums depend on the order
PEFT_TOLERANCE = 1e-5
STRENGTH = 0.15
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "qwen2",
    "gemma2",
    "phi3",
    "opt",
    "mixtral",
    "falcon_h1",
    "qwen3_5_text",
    "mamba2",
)
pytestmark = pytest.mark.filterwarnings("ignore")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def use(span: ModelSpan, name: str, file: AdapterFile) -> None:
    """As a node does: read what is for this span, and have it."""
    loras = file.load(span.family, span.model, span.start, span.end, device=span.device, dtype=span.dtype)
    span.adapters.add(name, loras)


class Route:
    """The spans of a checkpoint, one after another, with the adapters that they were given."""

    def __init__(self, folder: Path, adapters: dict[str, AdapterFile], **options: Any) -> None:
        checkpoint = Checkpoint(folder)
        cuts = [0, 2, 4, checkpoint.units]
        self.runners = []
        for start, end in pairwise(cuts):
            span = load_span(checkpoint, start, end, check=False, **options)
            for name, file in adapters.items():
                use(span, name, file)
            self.runners.append(StageRunner(span, RunnerConfig(1 << 24)))

    def open(self, session: str, adapter: str) -> None:
        for runner in self.runners:
            runner.open(session, rows=1, max_length=64, adapter=adapter)

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for runner in self.runners:
            results = runner.run([StepInput(name, x, WANT_ALL) for name, x in inputs.items()])
            inputs = {result.session_id: result.output for result in results}
        return inputs


@torch.inference_mode()
def whole(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def assert_same(one: torch.Tensor, other: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert one.shape == other.shape
    assert float((one - other).abs().max()) < tolerance * float(other.std())


class Saved:
    """A family's tiny model on disk, and two adapters of it with what they make of the model."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
        self.folder = folder / "model"
        self.model.save_pretrained(self.folder)
        linears = {name for name, module in self.model.named_modules() if is_linear(module)}
        if getattr(self.model.config, "tie_word_embeddings", False):
            linears = {
                name for name in linears if "." in name
            }  # merged, the head's change would be the embedding's, too
        tensors = [matrices(self.model, linears.__contains__, seed=seed, strength=STRENGTH) for seed in (1, 2)]
        folders = [
            write_adapter(folder / "one", tensors[0], fan_in_fan_out=name == "gpt2"),
            write_adapter(folder / "two", tensors[1], use_rslora=True, fan_in_fan_out=name == "gpt2"),
        ]
        self.folders = dict(zip(("one", "two"), folders, strict=True))
        self.adapters = {key: adapter_in(one) for key, one in self.folders.items()}
        self.merged = {
            "": self.model,
            "one": merge(copy.deepcopy(self.model), tensors[0]),
            "two": merge(copy.deepcopy(self.model), tensors[1], rslora=True),
        }


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved("llama", tmp_path_factory.mktemp("llama"))


def test_sessions_with_different_adapters_beside_one_another(saved: Saved) -> None:
    route = Route(saved.folder, saved.adapters)
    sessions = {f"{name or 'alone'} {number}": name for number, name in enumerate(["", "one", "two", "one", ""])}
    texts = {session: ids_of(9, seed=number) for number, session in enumerate(sessions)}
    for session, adapter in sessions.items():
        route.open(session, adapter)
    outputs = route.run({session: ids[:, :5] for session, ids in texts.items()})
    for at in range(5, 9):  # step by step, with caches
        later = route.run({session: ids[:, at : at + 1] for session, ids in texts.items()})
        outputs = {session: torch.cat([outputs[session], later[session]], 1) for session in texts}
    for session, adapter in sessions.items():
        assert_same(outputs[session], whole(saved.merged[adapter], texts[session]))
    apart = [
        float((whole(saved.merged[name], ids_of(9)) - whole(saved.model, ids_of(9))).abs().max())
        for name in ("one", "two")
    ]
    assert min(apart) > 0.01  # it would be seen if an adapter did nothing


def test_sessions_with_different_adapters_share_a_pass(llama: Saved) -> None:
    route = Route(llama.folder, llama.adapters)
    for session, adapter in (("a", ""), ("b", "one"), ("c", "two"), ("d", "one")):
        route.open(session, adapter)
    route.run({session: ids_of(6) for session in "abcd"})
    for runner in route.runners:
        assert [len(cohort.members) for cohort in runner.pool.cohorts] == [4]


def test_a_layer_that_does_not_tell_its_rows_has_passes_of_one_adapter(
    llama: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts get positions of any rows. It shows in the first pass, whose texts are right all the same."""
    route = Route(llama.folder, llama.adapters)
    adapters = dict(zip("abcd", ("", "one", "two", "one"), strict=True))
    lead(route, dict(adapters), steps=1)  # with copies for these rows
    monkeypatch.setattr(SpanAdapters, "_tells_rows", lambda *_: False)
    for session, logits in lead(route, adapters).items():
        assert_same(logits, whole(llama.merged[adapters[session]], ids_of(9, seed=ord(session))))
    assert not any(runner.span.adapters.are_shared for runner in route.runners)


def test_rows_are_told_by_the_shape_of_a_layer_s_inputs() -> None:
    layers = nn.ModuleDict({"plain": nn.Linear(2, 2), "experts": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    layers.requires_grad_(False)
    adapters, lora = SpanAdapters(layers), Lora(torch.ones(1, 2), torch.ones(2, 1))
    adapters.add("one", {"plain": lora})
    adapters.choose(("one", "", "one"), 4)
    for shape in ((3, 4, 2), (3, 1, 2), (3, 2, 4, 2), (12, 2)):
        x = torch.ones(shape)
        changed = (layers["plain"](x) - nn.functional.linear(x, layers["plain"].weight, layers["plain"].bias)).view(
            3, -1
        )
        assert torch.allclose(changed, torch.tensor([2.0, 0.0, 2.0])[:, None])
    assert adapters.are_shared
    for shape in ((4, 3, 2), (11, 2)):
        with pytest.raises(ProtocolError, match="plain cannot be told apart"):
            layers["plain"](torch.ones(shape))
    assert not adapters.are_shared
    other = SpanAdapters(layers)
    other.add("one", {"experts.up": lora})
    assert not other.are_shared


def lead(route: Route, adapters: dict[str, str], steps: int = 3) -> dict[str, torch.Tensor]:
    """The logits of sessions that decode together, each with its own text and adapter; the sessions are closed at the end."""
    for session, adapter in adapters.items():
        route.open(session, adapter)
    texts = {session: ids_of(6 + steps, seed=ord(session)) for session in adapters}
    outputs = [route.run({session: ids[:, :6] for session, ids in texts.items()})]
    outputs += [
        route.run({session: ids[:, at : at + 1] for session, ids in texts.items()}) for at in range(6, 6 + steps)
    ]
    for runner in route.runners:
        for session in adapters:
            runner.close(session)
    return {session: torch.cat([each[session] for each in outputs], 1) for session in adapters}


@pytest.mark.parametrize("limit", [None, 0])
def test_all_kinds_of_adapters_in_one_pass(llama: Saved, tmp_path: Path, limit: int | None) -> None:
    """Other ranks, DoRA, a replaced layer and no adapter share a pass, also without room for copies of the matrices."""
    high = matrices(llama.model, lambda key: "_proj" in key, rank=7, seed=3, strength=STRENGTH)
    scaled = with_magnitudes(matrices(llama.model, lambda key: "down_proj" in key, seed=4, strength=STRENGTH))
    head = {"base_model.model.lm_head.weight": torch.randn(llama.model.lm_head.weight.shape)}
    files = {
        **llama.adapters,
        "high": adapter_in(write_adapter(tmp_path / "high", high, r=7)),
        "scaled": adapter_in(write_adapter(tmp_path / "scaled", scaled, use_dora=True)),
        "head": adapter_in(write_adapter(tmp_path / "head", head, modules_to_save=["lm_head"])),
    }
    models = {
        **llama.merged,
        "high": merge(copy.deepcopy(llama.model), high),
        "scaled": merge(copy.deepcopy(llama.model), scaled),
        "head": copy.deepcopy(llama.model),
    }
    models["head"].lm_head.weight.data = head["base_model.model.lm_head.weight"]
    route = Route(llama.folder, files)
    ledgers = [MemoryLedger(limit) for _ in route.runners]
    for runner, ledger in zip(route.runners, ledgers, strict=True):
        runner.span.adapters.ledger = ledger
    adapters = dict(zip("abcdefg", ("high", "", "one", "scaled", "head", "one", "two"), strict=True))
    for session, logits in lead(route, adapters).items():
        assert_same(logits, whole(models[adapters[session]], ids_of(9, seed=ord(session))))
    held = [ledger.accounts()[Account.ADAPTERS] for ledger in ledgers]
    assert all(held) if limit is None else not any(held)
    for runner in route.runners:
        runner.close_all()
    assert not any(ledger.accounts()[Account.ADAPTERS] for ledger in ledgers)


@pytest.mark.parametrize("around", [("two", "", "two"), ("broken", "broken", "broken"), ("two", "broken", "")])
def test_other_adapters_in_a_pass_change_no_bit_of_a_text(llama: Saved, around: tuple[str, str, str]) -> None:
    """Numbers that are NaN stay in their rows, too; no node loads such an adapter."""
    route = Route(llama.folder, llama.adapters)
    for runner in route.runners:
        loras = llama.adapters["two"].load(runner.span.family, runner.span.model, runner.span.start, runner.span.end,
                                           device=runner.span.device, dtype=runner.span.dtype)  # fmt: skip
        broken = {
            key: replace(lora, b_OR=lora.b_OR * float("nan")) for key, lora in loras.items() if isinstance(lora, Lora)
        }
        runner.span.adapters.add("broken", broken)
    usual = lead(route, dict(zip("abcde", ("two", "one", "two", "", "two"), strict=True)))
    beside = lead(route, dict(zip("abcde", (around[0], "one", around[1], "", around[2]), strict=True)))
    for session in "bd":
        assert torch.equal(beside[session], usual[session])


def test_recorded_steps_go_through_each_row_s_adapter(llama: Saved) -> None:
    route = Route(llama.folder, llama.adapters)
    for runner in route.runners:
        assert runner.captured is not None
        runner.captured.stopwatch = Stopwatch(
            runner.span.device, clock=iter(range(1 << 20)).__next__
        )  # all take as long
    adapters = dict(zip("abcd", ("one", "", "two", "one"), strict=True))
    for session, logits in lead(route, adapters, steps=14).items():
        assert_same(logits, whole(llama.merged[adapters[session]], ids_of(20, seed=ord(session))))
    assert all(runner.captured is not None and runner.captured.replays for runner in route.runners)


def test_an_adapter_that_is_not_loaded_opens_no_session(llama: Saved) -> None:
    route = Route(llama.folder, llama.adapters)
    with pytest.raises(ProtocolError) as caught:
        route.open("a", "three")
    assert caught.value.code == ErrorCode.INTERNAL
    assert "a" not in route.runners[0]


def test_an_adapter_that_goes_leaves_the_model_as_it_was(llama: Saved) -> None:
    route = Route(llama.folder, llama.adapters)
    route.open("a", "one")
    route.run({"a": ids_of(6)})
    for runner in route.runners:
        runner.close("a")
        runner.span.adapters.remove("one")
    route.open("b", "")
    assert_same(route.run({"b": ids_of(6)})["b"], whole(llama.model, ids_of(6)))


def test_an_adapter_of_few_layers_costs_other_spans_nothing(llama: Saved, tmp_path: Path) -> None:
    tensors = matrices(llama.model, lambda name: ".3." in name and "q_proj" in name)
    route = Route(llama.folder, {"last": adapter_in(write_adapter(tmp_path, tensors))})
    route.open("a", "last")
    merged = merge(copy.deepcopy(llama.model), tensors)
    assert_same(route.run({"a": ids_of(6)})["a"], whole(merged, ids_of(6)))
    hooks = [sum(len(module._forward_hooks) for module in runner.span.model.modules()) for runner in route.runners]
    assert hooks == [0, 0, 1]


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_quantised_layers_take_adapters(llama: Saved, quantize: str) -> None:
    """The change is the adapter's own, in full precision: what quantising changes it changes without an adapter, too."""
    route = Route(llama.folder, llama.adapters, quantize=quantize)
    for runner in route.runners[:1]:
        layer = runner.span.model.get_submodule("model.layers.0.self_attn.q_proj")
        assert type(layer) is not nn.Linear
        x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            runner.span.adapters.choose(())
            before = layer(x)
            runner.span.adapters.choose(("one",))
            after = layer(x)
        whole_layers = [llama.merged[name].get_submodule("model.layers.0.self_attn.q_proj") for name in ("", "one")]
        change = whole_layers[1](x) - whole_layers[0](x)
        assert float((after - before - change).abs().max()) < 1e-4 * float(change.std())


def test_layers_that_are_packed_meanwhile_keep_their_adapter(llama: Saved) -> None:
    """Packing puts another module in the layer's place, before an adapter came or after."""
    checkpoint = Checkpoint(llama.folder)
    for packed_first in (True, False):
        span = load_span(checkpoint, 0, checkpoint.units, check=False)
        name = "model.layers.1.mlp.down_proj"
        linear = span.model.get_submodule(name)
        packing = Packing(span.model, {name: (linear, FbgemmLinear)})
        if packed_first:
            packing.run()
        use(span, "one", llama.adapters["one"])
        if not packed_first:
            packing.run()
        runner = StageRunner(span, RunnerConfig(1 << 24))
        runner.open("a", rows=1, max_length=16, adapter="one")
        (result,) = runner.run([StepInput("a", ids_of(6), WANT_ALL)])
        expected = whole(llama.merged["one"], ids_of(6))
        assert isinstance(span.model.get_submodule(name), FbgemmLinear)
        assert float((result.output - expected).abs().max()) < 0.02 * float(expected.std())  # its weights are float16
        without = whole(merge(copy.deepcopy(llama.model), _without(llama, name)), ids_of(6))
        assert float((result.output - without).abs().max()) > 0.1 * float(expected.std())


def _without(saved: Saved, module: str) -> dict[str, torch.Tensor]:
    """The adapter's changes but for one layer's: what would come out if its hook were lost."""
    tensors = matrices(saved.model, lambda name: is_linear(saved.model.get_submodule(name)), seed=1, strength=STRENGTH)
    return {name: tensor for name, tensor in tensors.items() if module not in name}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(llama: Saved, dtype: torch.dtype) -> None:
    route = Route(llama.folder, llama.adapters, dtype=dtype)
    route.open("a", "one")
    output = route.run({"a": ids_of(9)})["a"].float()
    expected = whole(copy.deepcopy(llama.merged["one"]).to(dtype), ids_of(9)).float()
    assert float((output - expected).abs().mean()) < 0.05 * float(expected.std())


def lead_to(folder: Path, saved: Saved, tensors: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    """The logits of the spans of a model with one adapter."""
    route = Route(saved.folder, {"one": adapter_in(write_adapter(folder, tensors, **fields))})
    route.open("a", "one")
    return route.run({"a": ids_of(9)})["a"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_magnitudes_scale_the_rows_of_the_changed_matrices(name: str, tmp_path: Path) -> None:
    """DoRA, also with biases, which stay as they are, and with transposed matrices."""
    saved = Saved(name, tmp_path)
    for key, parameter in saved.model.named_parameters():
        if key.endswith("bias"):
            parameter.data.normal_()
    saved.model.save_pretrained(saved.folder)
    inside = matrices(saved.model, lambda key: "." in key and is_linear(saved.model.get_submodule(key)))
    tensors = with_magnitudes(inside)
    logits = lead_to(tmp_path / "dora", saved, tensors, use_dora=True)
    assert_same(logits, whole(merge(copy.deepcopy(saved.model), tensors), ids_of(9)))


def test_layers_are_replaced(llama: Saved, tmp_path: Path) -> None:
    """The embedding, a norm, the head, and the layers of a part: each in the span that has it."""
    changed = copy.deepcopy(llama.model)
    names = ["model.embed_tokens", "model.norm", "lm_head", "model.layers.1.mlp"]
    generator = torch.Generator().manual_seed(5)
    tensors = matrices(llama.model, lambda key: "q_proj" in key)
    for key, parameter in changed.named_parameters():
        if key.startswith(tuple(names)):
            parameter.data += torch.randn(parameter.shape, generator=generator) * STRENGTH
            tensors[f"base_model.model.{key}"] = parameter.data.clone()
    logits = lead_to(tmp_path, llama, tensors, modules_to_save=["embed_tokens", "norm", "lm_head", "layers.1.mlp"])
    assert_same(logits, whole(merge(changed, tensors), ids_of(9)))


@pytest.mark.skipif(library() is None, reason="the package xllamacpp is not installed, or not for this machine")
@pytest.mark.parametrize(("products", "tolerance"), [("exact", TOLERANCE), ("fast", 0.2)])
def test_magnitudes_beside_packed_weights(products: str, tolerance: float, tmp_path: Path) -> None:
    """DoRA, a replaced head and a plain adapter in one pass over weights that stay packed; fast products round activations."""
    save_llama_gguf(tmp_path / "tiny.gguf", form="Q4_0")
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    model = dequantised(tmp_path / "tiny.gguf", checkpoint)
    plain = matrices(model, lambda key: "_proj" in key, strength=0.1)
    scaled = with_magnitudes(matrices(model, lambda key: "_proj" in key, rank=2, seed=1, strength=0.1))
    scaled["base_model.model.lm_head.weight"] = torch.randn(model.lm_head.weight.shape, generator=torch.Generator())
    files = {
        "plain": adapter_in(write_adapter(tmp_path / "plain", plain)),
        "scaled": adapter_in(
            write_adapter(tmp_path / "scaled", scaled, r=2, use_dora=True, modules_to_save=["lm_head"])
        ),
    }
    changed = merge(copy.deepcopy(model), scaled)
    changed.lm_head.weight = nn.Parameter(scaled["base_model.model.lm_head.weight"])  # apart from the tied embedding
    models = {"": model, "plain": merge(copy.deepcopy(model), plain), "scaled": changed}
    span = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products=products, check=False)
    runner = StageRunner(span, RunnerConfig(1 << 24))
    for name, file in files.items():
        use(span, name, file)
    texts = {name: ids_of(8, seed=at) for at, name in enumerate(models)}
    for name in models:
        runner.open(name, rows=1, max_length=16, adapter=name)
    for result in runner.run([StepInput(name, ids, WANT_ALL) for name, ids in texts.items()]):
        assert_same(result.output, whole(models[str(result.session_id)], texts[str(result.session_id)]), tolerance)


PEFT_FORMS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6},
        "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3},
    },
    "tied": {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj"]},
    "whole": {"modules_to_save": ["lm_head", "norm"], "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize(
    ("name", "form"),
    [*(("gemma2" if form == "tied" else "llama", form) for form in PEFT_FORMS), ("gpt2", "rslora"), ("gpt2", "dora")],
)
def test_peft_gives_the_same(name: str, form: str, tmp_path: Path) -> None:
    """Against peft itself, and files that it has written, where it is installed (docs/testing.md)."""
    peft = pytest.importorskip("peft")
    saved = Saved(name, tmp_path)
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    settings = {"target_modules": targets, **PEFT_FORMS[form]}
    config = peft.LoraConfig(r=RANK, lora_alpha=16, fan_in_fan_out=name == "gpt2", **settings)
    adapted = written_by_peft(saved.model, config, tmp_path / "theirs")
    route = Route(saved.folder, {"theirs": adapter_in(tmp_path / "theirs")})
    route.open("a", "theirs")
    assert_same(route.run({"a": ids_of(12)})["a"], whole(adapted, ids_of(12)), PEFT_TOLERANCE)


def written_by_peft(model: nn.Module, config: Any, folder: Path) -> nn.Module:
    """Save an adapter with random matrices and return the model with it, both by peft."""
    peft = pytest.importorskip("peft")
    adapted: Any = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_magnitude" in key or "modules_to_save" in key:
                parameter.mul_(torch.rand(parameter.shape) + 0.5)
            elif "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape) * STRENGTH)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


def drawn_config(draw: random.Random) -> dict[str, Any]:
    """Settings of peft's LoraConfig for a llama of two layers or more, which may contradict one another in order and overlap."""
    patterns = [
        *(
            "q_proj",
            "proj",
            "mlp.down_proj",
            "self_attn.v_proj",
            "layers.0.self_attn.q_proj",
            "model.layers.1.mlp.up_proj",
        ),
        *(
            "^model.layers.0.mlp.down_proj",
            r"layers\.1\.self_attn\.q_proj$",
            "layers.1.self_attn.q_pro",
            "0.self_attn.v_proj",
        ),
    ]
    settings: dict[str, Any] = {
        "r": draw.randint(1, 9),
        "lora_alpha": draw.choice([1, 16, 3.5]),
        "use_rslora": draw.random() < 0.5,
        "use_dora": draw.random() < 0.4,
        "target_modules": draw.choice(
            [
                ["q_proj"],
                ["q_proj", "v_proj", "down_proj"],
                "all-linear",
                r".*layers\.[01]\..*(q|up)_proj",
                ["mlp.up_proj", "o_proj"],
            ]
        ),
        "rank_pattern": {key: draw.randint(1, 9) for key in draw.sample(patterns, draw.randint(0, 4))},
        "alpha_pattern": {key: draw.choice([2, 5, 0.5]) for key in draw.sample(patterns, draw.randint(0, 4))},
    }
    if draw.random() < 0.3 and isinstance(settings["target_modules"], list):
        settings["layers_to_transform"] = draw.choice([[0], [1]])
    if draw.random() < 0.3:
        settings["exclude_modules"] = ["up_proj"]
    if draw.random() < 0.3:
        settings["modules_to_save"] = draw.choice([["norm"], ["lm_head"], ["embed_tokens", "norm"]])
    return settings


def test_peft_reads_drawn_adapters_alike(llama: Saved, tmp_path: Path) -> None:
    """Ranks and scales of overlapping patterns, DoRA, rsLoRA, targets, and whole layers. peft saves patterns in another order than
    it trained with; files whose ranks it then cannot read itself are refused here, too."""
    peft = pytest.importorskip("peft")
    draw, ids = random.Random(5), ids_of(7)
    wanted, files = {}, {}
    for number in range(9):
        folder = tmp_path / f"drawn {number}"
        torch.manual_seed(number)
        written_by_peft(llama.model, peft.LoraConfig(**drawn_config(draw)), folder)
        try:
            read = peft.PeftModel.from_pretrained(copy.deepcopy(llama.model), folder).eval()
        except RuntimeError:
            with pytest.raises(CheckpointError, match="the config says"):
                adapter_in(folder)
            continue
        wanted[folder.name], files[folder.name] = whole(read, ids), adapter_in(folder)
    assert 5 < len(files) < 9
    route = Route(llama.folder, files)
    for name in files:
        route.open(name, name)
    for name, logits in route.run(dict.fromkeys(files, ids)).items():
        assert_same(logits, wanted[name], PEFT_TOLERANCE)
