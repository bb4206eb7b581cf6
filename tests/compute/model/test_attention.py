"""Attention by position: that of torch, and the same bits for a position in any company."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.packing.attention import BY_POSITION, attention_by_position
from swarmnode.compute.model.packing.ggml import library
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.compute.model.test_packed_weight import pack

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
ORDER = 1e-5  # another order of float sums
SESSIONS, LENGTH, PROMPT = 4, 40, 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "count"), [(5, 1), (600, 1), (37, 5), (130, 70)])
def test_attention_is_torchs_and_knows_no_other_query(dtype: torch.dtype, columns: int, count: int) -> None:
    random = torch.Generator().manual_seed(columns)
    rows, heads, groups, width, padding = 3, 6, 2, 48, 4

    def some(among: int, length: int, width: int = width) -> Tensor:
        return torch.randn(rows, among, length + 7, width, generator=random).to(dtype)[:, :, :length]

    q, k, v = some(heads, count), some(groups, columns), some(groups, columns, 32)
    mask = torch.zeros(rows, 1, count, columns, dtype=torch.float16)
    mask += torch.full((count, columns), -math.inf).triu(columns - count + 1)
    mask[1, ..., :padding] = -math.inf
    y, _ = attention_by_position(None, q, k, v, mask)
    expected = functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask.float(), enable_gqa=True
    ).transpose(1, 2)
    seen = ~(mask[:, 0] == -math.inf).all(-1)  # positions before a row's first one mean nothing
    precision = {torch.float32: ORDER, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert float((y.float() - expected)[seen].abs().max()) < precision
    assert y.dtype == dtype and y.isfinite().all()
    for row, first in ((0, 0), (1, padding)):
        for at in range(max(0, first - columns + count), count):
            end = columns - count + at + 1
            one = slice(row, row + 1)
            alone, _ = attention_by_position(
                None, q[one, :, at : at + 1], k[one, :, first:end], v[one, :, first:end], None
            )
            assert torch.equal(alone[0, 0], y[row, at])


def test_a_mask_of_a_pass_of_training_is_read_in_its_own_dtype() -> None:
    """A stage without weights that learn takes no gradients."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 6, 16, generator=random) for _ in range(3))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    assert torch.allclose(attention_by_position(None, q, k, v, mask)[0], expected, atol=ORDER)


@pytest.mark.parametrize("save", [save_llama_gguf, save_moe_gguf], ids=["llama", "experts"])
@pytest.mark.parametrize("form", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_products_give_a_session_the_same_bits_in_any_company(
    save: object, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert callable(save)
    save(tmp_path / "tiny.gguf", form=form)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    span = load_span(checkpoint, 0, checkpoint.units, dtype=dtype, products="fast")
    assert span.config._attn_implementation == BY_POSITION
    random = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 200, (1, LENGTH + at), generator=random) for at in range(SESSIONS)]
    alone = [one_by_one(span, ids_BT) for ids_BT in texts]
    assert all(torch.equal(one_by_one(span, ids_BT, prompt=LENGTH), y) for ids_BT, y in zip(texts, alone, strict=True))
    assert all(torch.equal(y, other) for y, other in zip(together(span, texts), alone, strict=True))


def one_by_one(span: ModelSpan, ids_BT: Tensor, prompt: int = PROMPT) -> Tensor:
    """Return all logits of a text whose first `prompt` tokens are one pass, as a replay's are, and the others one each."""
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24))
    runner.open(0, rows=1, max_length=100)
    parts = [ids_BT[:, :prompt], *(ids_BT[:, at : at + 1] for at in range(prompt, ids_BT.shape[1]))]
    return torch.cat([runner.run([StepInput(0, part, want=2)])[0].output for part in parts], dim=1)


def together(span: ModelSpan, texts: list[Tensor]) -> list[Tensor]:
    """Return all logits of texts that begin one after another and go on side by side, sometimes by several tokens."""
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 26))
    found: list[list[Tensor]] = [[] for _ in texts]
    left = list(texts)
    for at in range(len(texts)):
        runner.open(at, rows=1, max_length=100)
    for turn in range(10 * LENGTH):
        works = []
        for at, rest in enumerate(left):
            count = (PROMPT if not found[at] else 1 + 2 * (turn % 3 == 0)) if turn >= 2 * at else 0
            if count and rest.shape[1]:
                works.append(StepInput(at, rest[:, :count], want=2))
                left[at] = rest[:, count:]
        for result in runner.run(works) if works else ():
            found[result.session_id].append(result.output)  # type: ignore[call-overload]
    return [torch.cat(parts, dim=1) for parts in found]
