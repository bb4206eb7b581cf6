"""Mixtures of experts in a span's graph of ggml: families, equal bits in any company, and routers that choose badly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnode.compute.gguf.gguf import GgufCheckpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import FORMATS, library
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix, GgmlStack
from swarmnode.compute.packing.packed_weight import PackedStack, PackedWeight
from swarmnode.compute.serving import expert_counts
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, StepInput
from swarmnode.errors import CheckpointError
from tests.compute.model.llama_gguf import save_moe_gguf
from tests.compute.packing.test_packed_weight import pack
from tests.compute.serving.test_graph_passes import (
    LENGTH,
    ROUNDED,
    family_span,
    graphs_of,
    logits,
    open_runner,
    some_ids,
)

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)


def mixture(folder: Path, form: str = "Q8_0", **options: Any) -> ModelSpan:
    save_moe_gguf(folder / "tiny.gguf", form=form, **options)
    checkpoint = pack(folder / "tiny.gguf", folder / "packed")
    return load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products="fast", check=False)


def to_few(name: str, values: Any) -> Any:
    """Let routers send each row to the first experts, or to the last ones."""
    if "gate_inp" in name:
        return values[:1] * torch.arange(1, len(values) + 1)[:, None].numpy().astype(values.dtype)
    return values


# Softmax before and after the choice, sigmoid with a bias, groups (torch chooses), a shared expert, experts behind a scale.
@pytest.mark.parametrize(
    "model_type",
    ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "granitemoe", "olmoe", "phimoe"],
)
def test_a_familys_mixture_is_torchs_way_with_equal_bits_at_any_cut(model_type: str, tmp_path: Path) -> None:
    span = family_span(model_type, tmp_path)
    ids_BT = some_ids(span)
    runner = open_runner(span)
    whole = logits(runner, ids_BT, [])
    assert graphs_of(runner).passes > 0, graphs_of(runner).refusals
    assert torch.equal(logits(runner, ids_BT, [3, 9, 10, 31, 32]), whole)
    by_torch = open_runner(span)
    by_torch.graphs = None
    wanted = logits(by_torch, ids_BT, [])
    assert float((whole - wanted).abs().mean() / wanted.std()) < ROUNDED


@pytest.mark.parametrize("router", [lambda _name, values: values, to_few], ids=["spread", "few experts"])
@pytest.mark.parametrize("form", ["Q4_0", "Q4_K", "Q6_K", "BF16"])
def test_company_and_threads_change_no_bits(form: str, router: Callable[[str, Any], Any], tmp_path: Path) -> None:
    width = FORMATS[form].block // 64 or 1
    span = mixture(tmp_path, form, width=width, experts=8, used=3, values=router)
    runner = open_runner(span)
    ids_BT = some_ids(span)
    alone = logits(runner, ids_BT, list(range(20, LENGTH)))
    assert graphs_of(runner).passes and not graphs_of(runner).refusals
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(logits(runner, ids_BT, []), alone)
            runner.open("all", rows=16, max_length=LENGTH)
            many = torch.cat([ids_BT, *(some_ids(span, seed=seed) for seed in range(2, 17))])
            (first,) = runner.run([StepInput("all", many[:, :8], WANT_ALL)])
            (step,) = runner.run([StepInput("all", many[:, 8:9], WANT_ALL)])
            runner.close("all")
            assert torch.equal(torch.cat([first.output, step.output], dim=1)[:1], alone[:, :9])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("F32", "F16", "MXFP4")])
def test_a_stacks_products_are_cut_where_company_would_change_bits(form: str) -> None:
    random = torch.Generator().manual_seed(1)
    from swarmnode.compute.gguf.repack import quantise

    inputs = max(256, FORMATS[form].block)
    try:
        packed = [quantise(torch.randn(64, inputs, generator=random), FORMATS[form], form) for _ in range(4)]
    except Exception as error:
        pytest.skip(str(error))
    stack = GgmlStack.of([GgmlMatrix(each, FORMATS[form], inputs) for each in packed])
    assert stack is not None
    x_RI = torch.randn(33, inputs, generator=random)
    alone = torch.cat([stack._tried(row_I[None]) for row_I in x_RI])
    most = stack.rows_at_once()
    for rows in range(2, 34):
        cut = torch.cat([stack._tried(part) for part in x_RI[:rows].split(min(most, 64))])
        assert torch.equal(cut, alone[:rows])


def test_torch_computes_a_router_between_graphs_of_several_threads(tmp_path: Path) -> None:
    span = family_span("dots1", tmp_path)  # its router limits groups of experts
    runner = open_runner(span)
    graphs_of(runner)._spare_cores.count = lambda: 2  # type: ignore[method-assign]
    ids_BT = some_ids(span)
    alone = logits(runner, ids_BT, [])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(logits(runner, ids_BT, [7, 8, 9]), alone)
    finally:
        torch.set_num_threads(threads)


def test_experts_share_one_memory_and_keep_their_values() -> None:
    rows = torch.randint(0, 99, (3, 8, 34), dtype=torch.uint8)
    matrices = [GgmlMatrix(part, FORMATS["Q8_0"], 32) for part in rows]
    before = [matrix.rows(torch.arange(8)) for matrix in matrices]
    stack = PackedStack([PackedWeight([matrix], torch.float32) for matrix in matrices])
    (joined,) = stack.stacks
    assert joined is not None
    assert [matrix.address - joined.address for matrix in matrices] == [0, joined.stride, 2 * joined.stride]
    assert all(torch.equal(one.rows(torch.arange(8)), values) for one, values in zip(matrices, before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_row_that_is_no_number_harms_no_other(bad: float, tmp_path: Path) -> None:
    span = mixture(tmp_path)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, span.hidden_size, generator=random)
    outputs = []
    for value in (0.0, bad):
        x[1, 2, ::7] = value
        runner = open_runner(span)
        runner.open(0, rows=2, max_length=9, start=1)
        outputs.append(runner.run([StepInput(0, x.clone(), WANT_ALL)])[0].output)
        assert graphs_of(runner).passes
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1, :2], outputs[1][1, :2])
    assert bad == 3e38 or not outputs[1][1, 2].isfinite().all(), "no text that looks right"


def test_choices_in_a_graph_are_counted_as_torchs(tmp_path: Path) -> None:
    span = mixture(tmp_path, experts=16)
    ids_BT = some_ids(span, 9)
    counts = []
    for takes_graphs in (True, False):
        runner = open_runner(span)
        runner.graphs = runner.graphs if takes_graphs else None
        runner.open(0, rows=1, max_length=16)
        runner.run([StepInput(0, ids_BT[:, :5])])
        runner.run([StepInput(0, ids_BT[:, 5:], guessed=3)])
        counts.append((runner.experts.text, runner.experts.guesses))
    assert counts[0] == counts[1] and counts[0][0] > 0
    assert expert_counts.ExpertCounts(span.stack).is_due()


def more(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (4, *shape[1:]) if "_exps" in name else shape


def taller(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[1] + 32, shape[2]) if name == "blk.1.ffn_up_exps.weight" else shape


@pytest.mark.parametrize("shape_of", [more, taller], ids=["more experts than matrices", "experts of unlike shapes"])
def test_tensors_that_are_not_the_experts_of_the_config_are_refused(
    shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]], tmp_path: Path
) -> None:
    save_moe_gguf(tmp_path / "bad.gguf", shape_of=shape_of)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"experts|shape|config"):
        GgufCheckpoint(tmp_path / "bad.gguf").pack(tmp_path / "out")


def test_a_stack_of_unlike_matrices_is_refused() -> None:
    rows: list[Tensor] = [torch.zeros(8, 34, dtype=torch.uint8), torch.zeros(16, 34, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="unlike shapes"):
        PackedStack([PackedWeight([GgmlMatrix(each, FORMATS["Q8_0"], 32)], torch.float32) for each in rows])
