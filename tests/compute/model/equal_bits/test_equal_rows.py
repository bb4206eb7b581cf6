"""Plain products with equal bits: a position's states are the same alone, in company, in chunks and after a cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from swarmnode.compute.model.adapters.span_adapters import Lora
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.equal_bits import equal_rows
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.errors import LocalError
from swarmnode.serving.span_part import cost_of_equal_bits, find_bits
from tests.tiny import TinyModel

SIZES: Any = {"vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 200}
HEADS: Any = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}
WINDOWS: Any = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "gemma3": Gemma3TextConfig(**SIZES, **HEADS, **WINDOWS),
}
LENGTH = 72


def saved(config: Any, folder: Path) -> Checkpoint:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return Checkpoint(folder)


def logits(runner: StageRunner, ids_BT: torch.Tensor, cuts: list[int], company: int = 0) -> torch.Tensor:
    """Of one text in passes of `cuts` positions, beside sessions of other lengths. Its last positions are cut off and come
    again."""
    draw = torch.Generator().manual_seed(company)

    def other(count: int) -> torch.Tensor:
        return torch.randint(128, (1, count), generator=draw)

    runner.open("text", rows=1, max_length=LENGTH)
    for number in range(company):
        runner.open(number, rows=1, max_length=4 * LENGTH)
        runner.run([StepInput(number, other(1 + 7 * number), 2)])
    found: list[torch.Tensor] = []
    start = turn = 0
    while start < LENGTH:
        count = min(cuts[turn % len(cuts)], LENGTH - start)
        turn += 1
        works = [StepInput("text", ids_BT[:, start : start + count], 2)]
        works += [StepInput(number, other(1 + (number + turn) % 3), 2) for number in range(company) if turn < 6]
        found.append(runner.run(works)[0].output)
        start += count
    runner.truncate("text", LENGTH - 5)  # wrong guesses
    again = runner.run([StepInput("text", ids_BT[:, LENGTH - 5 :], 2)])[0].output
    for name in ("text", *range(company)):
        runner.close(name)
    whole = torch.cat(found, 1)
    assert torch.equal(again, whole[:, -5:])
    return whole


@pytest.mark.parametrize(
    ("name", "kv", "dtype"),
    [
        ("llama", "plain", torch.bfloat16),
        ("llama", "int8", torch.bfloat16),
        ("qwen3", "plain", torch.float32),
        ("gemma3", "plain", torch.bfloat16),
        ("gemma3", "plain", torch.float32),
    ],
)
def test_a_position_has_the_same_bits_alone_in_company_and_in_chunks(
    name: str, kv: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = saved(MODELS[name], tmp_path)
    units = checkpoint.family.units
    runner = StageRunner(
        load_span(checkpoint, 0, units, dtype=dtype, equal_bits=True, check=False), RunnerConfig(1 << 28, kv=kv)
    )
    ids_BT = torch.randint(128, (1, LENGTH), generator=torch.Generator().manual_seed(9))
    whole = logits(runner, ids_BT, [LENGTH])
    for cuts, company in (([50, 1], 0), ([33, 8], 0), ([40, 1, 1, 2], 2), ([60, 1, 3], 8), ([70, 1], 33)):
        assert torch.equal(logits(runner, ids_BT, cuts, company), whole), (cuts, company)
    assert find_bits(runner) != b""
    assert "tokens/s" in cost_of_equal_bits(runner)


def test_a_session_beside_one_with_an_adapter_keeps_its_bits(tmp_path: Path) -> None:
    """In parts of several sizes, and with guesses taken back. The session with the adapter states no class."""
    checkpoint = saved(MODELS["llama"], tmp_path)
    span = load_span(checkpoint, 0, checkpoint.family.units, dtype=torch.bfloat16, equal_bits=True, check=False)
    runner = StageRunner(span, RunnerConfig(1 << 28))
    runner.bits = find_bits(runner)
    ids_BT = torch.randint(128, (1, LENGTH), generator=torch.Generator().manual_seed(9))
    whole = logits(runner, ids_BT, [LENGTH])
    draw = torch.Generator().manual_seed(2)
    adapter = {
        f"model.layers.{layer}.self_attn.{name}": Lora(
            torch.randn(4, 96, generator=draw), torch.randn(size, 4, generator=draw)
        )
        for layer in (0, 1)
        for name, size in (("q_proj", 96), ("v_proj", 48))
    }
    span.adapters.add("verse", adapter)
    for cuts in ([LENGTH], [50, 1], [33, 8, 1]):
        for name in ("", "verse"):
            runner.open(name, rows=1, max_length=LENGTH, adapter=name)
        found: dict[Any, list[torch.Tensor]] = {"": [], "verse": []}
        start = turn = 0
        while start < LENGTH:
            end = min(LENGTH, start + cuts[turn % len(cuts)])
            for result in runner.run([StepInput(name, ids_BT[:, start:end], 2) for name in found]):
                found[result.session_id].append(result.output)
            start, turn = end, turn + 1
        runner.truncate("", LENGTH - 5)
        again = runner.run([StepInput("", ids_BT[:, LENGTH - 5 :], 2)])[0].output
        assert torch.equal(torch.cat(found[""], 1), whole) and torch.equal(again, whole[:, -5:]), cuts
        assert not torch.allclose(torch.cat(found["verse"], 1).float(), whole.float(), atol=0.1)
        assert runner.has_equal_bits("") and not runner.has_equal_bits("verse")
        for name in ("", "verse"):
            runner.close(name)


def test_the_trial_sees_another_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that splits its sums from some number of rows on is found for any such number, and bounds below it are taken."""
    linear = torch.nn.functional.linear
    weight_OI = torch.ones(48, 96)
    for split in (17, 24, 40, 65, 100, 200, 513):

        def other(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, split: int = split) -> torch.Tensor:
            halves = x.shape[0] >= split
            return (
                linear(x[:, :48], weight[:, :48]) + linear(x[:, 48:], weight[:, 48:]) if halves else linear(x, weight)
            )

        monkeypatch.setattr(equal_rows.functional, "linear", other)
        found = equal_rows._find_bounds(weight_OI, in_blocks=False)
        monkeypatch.setattr(equal_rows.functional, "linear", linear)
        assert found is None or found.most < split or found.least >= split, (split, found)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=32), "multiplies in a way of its own"),
        (
            MixtralConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3, num_local_experts=2),
            "multiplies in a way of its own",
        ),
        (Gemma2Config(**SIZES, **HEADS), "attention in a way of its own"),
    ],
)
def test_what_has_no_equal_bits_is_refused_in_a_sentence(config: Any, reason: str, tmp_path: Path) -> None:
    checkpoint = saved(config, tmp_path)
    with pytest.raises(LocalError, match=reason):
        load_span(checkpoint, 0, checkpoint.family.units, equal_bits=True, check=False)


def test_a_machine_whose_bits_depend_on_the_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_rows, "_find_bounds", lambda *_, **__: None)
    monkeypatch.setattr(equal_rows, "_found", {})
    with pytest.raises(LocalError, match="depend on the number of rows"):
        load_span(Checkpoint(TinyModel.save(tmp_path).folder), 0, 2 + 4, equal_bits=True, check=False)
