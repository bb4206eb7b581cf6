"""Attention and activation functions by position: torch's values, and the same bits in any company with any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from swarmnode.compute.model.attention import BY_POSITION, SameBits, attention_by_position
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf
from tests.compute.packing.test_packed_weight import pack

pytestmark = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
ORDER = 1e-5  # another order of float sums
SESSIONS, LENGTH, PROMPT = 3, 15, 1030
THREADS = (1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "count", "heads", "groups"),
    [(5, 1, 6, 2), (600, 1, 4, 1), (1100, 1, 1, 1), (1100, 1, 6, 2), (520, 1, 3, 3), (37, 5, 1, 1), (130, 70, 6, 2)],
)
def test_attention_is_torchs_and_knows_neither_other_queries_nor_threads(
    dtype: torch.dtype, columns: int, count: int, heads: int, groups: int, set_threads: Callable[[int], None]
) -> None:
    random = torch.Generator().manual_seed(columns)
    rows, width, padding = 3, 48, 4

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
            for threads in THREADS if count == 1 else (1 + at % 3,):
                set_threads(threads)
                alone, _ = attention_by_position(
                    None, q[one, :, at : at + 1], k[one, :, first:end], v[one, :, first:end], None
                )
                assert torch.equal(alone[0, 0], y[row, at])
    set_threads(2)
    assert torch.equal(attention_by_position(None, q, k, v, mask)[0][seen], y[seen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        functional.silu,
        torch.nn.SiLU(inplace=True),
        functional.gelu,
        torch.nn.GELU("tanh"),
        torch.sigmoid,
        functional.sigmoid,
        functional.softplus,
        functional.mish,
        functional.elu,
    ],
)
@torch.inference_mode()
def test_a_row_of_an_activation_function_has_the_same_bits_in_any_company(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    random = torch.Generator().manual_seed(1)
    for width in (1, 20, 96, 1000, 1536, 1568):
        x_RI = torch.randn(70, width, generator=random).to(dtype) * 3
        with SameBits():
            alone = torch.cat([function(x_I[None].clone()) for x_I in x_RI])
            for threads in (1, 2, 3, 5, 7):
                set_threads(threads)
                for rows in (2, 23, 43, 70):
                    assert torch.equal(function(x_RI[:rows].clone()), alone[:rows])
            apart = x_RI.repeat(1, 2)[:, :width]  # rows do not follow each other in memory
            assert torch.equal(function(apart), alone)
        set_threads(1)
        torch.testing.assert_close(alone, function(x_RI.clone()))


@pytest.mark.parametrize("shape", [(32, 256), (8, 1024), (16, 576), (576, 16), (1, 64)])
def test_a_plain_product_gives_a_row_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    """As of a router, and of an adapter's two matrices."""
    random = torch.Generator().manual_seed(1)
    weight_OI = nn.Parameter(torch.randn(*shape, generator=random))
    x_RI = torch.randn(170, shape[1], generator=random)
    with torch.inference_mode(), SameBits():
        whole = functional.linear(x_RI, weight_OI)
        for rows in (1, 2, 3, 5, 40):
            parts = [functional.linear(part[None], weight_OI)[0] for part in x_RI.split(rows)]
            assert torch.equal(torch.cat(parts), whole), rows
        assert torch.equal(functional.linear(input=x_RI, weight=weight_OI, bias=None), whole), "however it is called"
    torch.testing.assert_close(whole, functional.linear(x_RI, weight_OI.detach()))


def test_a_mask_of_a_pass_of_training_is_read_in_its_own_dtype() -> None:
    """A stage without weights that learn takes no gradients."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 6, 16, generator=random) for _ in range(3))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    assert torch.allclose(attention_by_position(None, q, k, v, mask)[0], expected, atol=ORDER)


@pytest.mark.parametrize("family", [modeling_gemma2, modeling_gpt_oss], ids=["cap", "sinks"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_caps_and_sinks_are_the_familys(family: Any, count: int) -> None:
    """The mask's dtype says whether it is a pass of training, which the family's own code computes."""
    random = torch.Generator().manual_seed(count)
    q, k, v = (
        torch.randn(2, among, 9, 16, generator=random)[:, :, -length:] for among, length in ((4, count), (2, 9), (2, 9))
    )
    mask = torch.full((count, 9), -math.inf).triu(10 - count).expand(2, 1, -1, -1)
    module = type("Attention", (torch.nn.Module,), {"__module__": family.__name__})()
    module.num_key_value_groups, module.sinks = 2, torch.nn.Parameter(torch.randn(4, generator=random))
    given = {"softcap": 0.5} if family is modeling_gemma2 else {"s_aux": module.sinks}
    with torch.no_grad():
        expected = family.eager_attention_forward(module, q, k, v, mask, scaling=0.3, dropout=0.0, **given)[0]
        for mine in (mask.half(), mask, None):
            y = attention_by_position(module, q, k, v, mine, scaling=0.3, **given)[0]
            assert torch.allclose(y, expected, atol=ORDER)
        plain = attention_by_position(module, q, k, v, mask.half(), scaling=0.3)[0]
    assert not torch.allclose(plain, expected, atol=0.01)


@pytest.mark.parametrize("save", [save_llama_gguf, save_moe_gguf], ids=["llama", "experts"])
@pytest.mark.parametrize(("form", "dtype"), [("Q4_0", torch.float32), ("Q8_0", torch.bfloat16)])
def test_fast_products_give_a_session_the_same_bits_in_any_company(
    save: object, form: str, dtype: torch.dtype, tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    assert callable(save)
    save(tmp_path / "tiny.gguf", form=form)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    span = load_span(checkpoint, 0, checkpoint.units, dtype=dtype, products="fast")
    assert span.config._attn_implementation == BY_POSITION
    random = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 200, (1, PROMPT + LENGTH + at), generator=random) for at in range(SESSIONS)]
    alone = [one_by_one(span, ids_BT) for ids_BT in texts]
    replays = [one_by_one(span, ids_BT, PROMPT + LENGTH, last=set_threads) for ids_BT in texts]
    for others in (replays, together(span, texts, set_threads)):
        assert all(torch.equal(y, other) for y, other in zip(others, alone, strict=True))


def one_by_one(
    span: ModelSpan, ids_BT: Tensor, prompt: int = PROMPT, last: Callable[[int], None] | None = None
) -> Tensor:
    """Return all logits of a text whose first `prompt` tokens are one pass, as a replay's are, and the others one each.

    The last one is computed with two threads if there is a function `last` that sets their number.
    """
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24))
    runner.open(0, rows=1, max_length=2 * PROMPT)
    parts = [ids_BT[:, :prompt], *(ids_BT[:, at : at + 1] for at in range(prompt, ids_BT.shape[1]))]
    found = []
    for number, part in enumerate(parts, 1):
        if last is not None:
            last(2 if number == len(parts) else 1)
        found.append(runner.run([StepInput(0, part, want=2)])[0].output)
    return torch.cat(found, dim=1)


def together(span: ModelSpan, texts: list[Tensor], set_threads: Callable[[int], None]) -> list[Tensor]:
    """Return all logits of texts that begin one after another and go on side by side, sometimes by several tokens.

    Two passes have two threads: each product of a second one may wait for a busy machine.
    """
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 26))
    found: list[list[Tensor]] = [[] for _ in texts]
    left = list(texts)
    for at in range(len(texts)):
        runner.open(at, rows=1, max_length=2 * PROMPT)
    for turn in range(10 * LENGTH):
        works = []
        for at, rest in enumerate(left):
            count = (PROMPT if not found[at] else 1 + 2 * (turn % 3 == 0)) if turn >= 2 * at else 0
            if count and rest.shape[1]:
                works.append(StepInput(at, rest[:, :count], want=2))
                left[at] = rest[:, count:]
        set_threads(2 if turn in (8, 9) else 1)
        for result in runner.run(works) if works else ():
            found[result.session_id].append(result.output)  # type: ignore[call-overload]
    return [torch.cat(parts, dim=1) for parts in found]
