"""KV caches in 8 bits: what is kept, what it costs, and the same text whatever happens to a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.serving.cache import CachePool
from swarmnode.compute.serving.captured_decode import StaticColumns
from swarmnode.compute.serving.cohort import STORES, CachedSession, Cohort, Window, quantise
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.config import FAST, INT8_KV, PLAIN
from swarmnode.founding.model_source import from_checkpoint
from tests.compute.model.llama_gguf import save_llama_gguf, save_moe_gguf

LAYERS, HEADS, DIM = range(1, 3), 2, 16
ROUNDED = 2e-5  # of the logits: sums in another order, as without 8 bits
PER_VECTOR = DIM + 2  # bytes of one head's keys or values at one position


@pytest.fixture(scope="module")
def checkpoint(checkpoint_path: Any) -> Checkpoint:
    return Checkpoint(checkpoint_path)


@pytest.fixture(scope="module")
def layers(checkpoint: Checkpoint) -> ModelSpan:
    return load_span(checkpoint, 2, 4)


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint) -> ModelSpan:
    return load_span(checkpoint, 0, checkpoint.units)


# -- one vector


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=70),
    st.sampled_from([1.0, 1e-3, 1e-30, 1e-38]),
)
def test_a_value_is_kept_to_half_a_level(values: list[float], factor: float) -> None:
    states = torch.tensor([values]) * factor
    levels, scales = quantise(states)
    assert levels.dtype is torch.int8 and scales.dtype is torch.bfloat16
    assert int(levels.int().abs().max()) <= 127
    scale = float(scales)
    largest = float(states.abs().max())
    assert scale <= max(largest / 127 * (1 + 2**-7), 1.01e-30)
    error = (levels.double() * scale - states.double()).abs().max()
    assert float(error) <= scale * 0.5001


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(bad: float) -> None:
    states = torch.ones(1, 1, 1, DIM)
    states[..., 3] = bad
    buffers = STORES[INT8_KV].allocate(states, states, 1, 1)
    keys, values = STORES[INT8_KV].write(buffers, states, states, 0)
    assert not keys.isfinite().any() and not values.isfinite().any()


def test_each_head_and_position_has_its_own_scale() -> None:
    states = torch.ones(1, 2, 3, DIM)
    states[0, 1, 2] = 1000.0
    levels, scales = quantise(states)
    assert bool((levels == 127).all())
    assert scales.flatten().tolist() == pytest.approx([1 / 127] * 5 + [1000 / 127], rel=2**-8)


# -- cohorts


def states_of(session: str, start: int, count: int, rows: int = 1, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Keys and values of positions of a session, the same whenever they are asked for."""
    found = []
    for position in range(start, start + count):
        generator = torch.Generator().manual_seed(1000 * sum(map(ord, session)) + position)
        found.append(torch.randn(2, rows, HEADS, 1, dim, generator=generator))
    keys, values = torch.cat(found, 3)
    return keys, values


class Texts:
    """Sessions of a pool that write `states_of` their positions."""

    def __init__(self, pool: CachePool, *names: str, rows: int = 1) -> None:
        self.pool = pool
        self.sessions = {name: self.open(name, rows) for name in names}

    def open(self, name: str, rows: int = 1) -> CachedSession:
        return self.pool.open(name, rows=rows, max_length=400, layers=LAYERS)

    def step(self, names: Sequence[str], count: int = 1) -> Cohort:
        """A pass over the next positions of these sessions; others of their cohort get noise."""
        chosen = {self.sessions[name]: name for name in names}
        last = None
        for cohort in self.pool.prepare(list(chosen), count):
            keys, values = torch.randn(2, cohort.rows, HEADS, count, DIM)
            for member in cohort.members:
                if member in cohort.present:
                    name = chosen[member]
                    keys[member.row_slice], values[member.row_slice] = states_of(
                        name, member.length, count, member.rows
                    )
            for layer in LAYERS:
                cohort.update(keys, values * (layer + 1), layer)
            cohort.advance(dict.fromkeys(cohort.present, count))
            last = cohort
        assert last is not None
        return last

    def kept(self, name: str, layer: int) -> list[Tensor]:
        """What the buffers of a layer hold of a session."""
        session = self.sessions[name]
        cohort = session.cohort
        assert cohort is not None
        held = cohort.held(session, layer)
        return [buffer[session.row_slice, :, held] for buffer in cohort.buffers[layer]]

    def check(self, name: str) -> None:
        """The buffers hold the bytes of the session's newest positions, as if each had come alone."""
        session = self.sessions[name]
        length = session.length
        for layer in LAYERS:
            window = self.pool.windows.get(layer)
            seen = length if window is None else min(length, length - session.floor + window.size - 1)
            kept = [buffer[:, :, -seen:] for buffer in self.kept(name, layer)]
            count = kept[0].shape[2]
            assert count == seen
            keys, values = states_of(name, length - count, count, session.rows)
            expected = (*quantise(keys), *quantise(values * (layer + 1)))
            for found, wanted in zip(kept, expected, strict=True):
                assert found.dtype is wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("windows", [{}, {1: Window(12, slack=17, room=12)}], ids=["all", "window"])
def test_bytes_of_a_position_never_change(layers: ModelSpan, windows: dict[int, Window]) -> None:
    """Prompt or decoded, alone or in company, absent, regrouped, cut back, copied: a position keeps its bytes."""
    texts = Texts(CachePool(layers, 1 << 24, windows=windows, kv=INT8_KV), "a", "b", "c")
    for name, count in (("a", 9), ("b", 12), ("c", 7)):
        texts.step([name], count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        texts.step([name for name in "abc" if torch.rand(1, generator=generator) < 0.7] or ["b"])
        for name in "abc":
            texts.check(name)
    texts.pool.truncate("b", texts.sessions["b"].length - 9)
    texts.step(["a", "b"])
    texts.check("b")
    length = texts.sessions["a"].length - 1
    texts.sessions["copy"] = texts.open("copy")
    texts.pool.fork("a", "copy", length)
    before = [kept[:, :, : kept.shape[2] - 1] for kept in texts.kept("a", 2)]
    assert all(map(torch.equal, before, texts.kept("copy", 2)))
    texts.pool.close("a")
    texts.check("b")
    texts.check("c")


def test_rows_change_places_with_their_scales(layers: ModelSpan) -> None:
    texts = Texts(CachePool(layers, 1 << 24, kv=INT8_KV), "beams", rows=3)
    texts.step(["beams"], 10)
    before = [kept.clone() for kept in texts.kept("beams", 1)]
    texts.pool.reorder("beams", [2, 0, 0])
    assert all(torch.equal(after, kept[[2, 0, 0]]) for after, kept in zip(texts.kept("beams", 1), before, strict=True))


def test_memory_is_counted_to_the_byte(layers: ModelSpan) -> None:
    """What a cohort holds, and one layer in float32 for the copy that attention reads."""
    texts = Texts(CachePool(layers, 1 << 24, kv=INT8_KV), "a", "b")
    texts.step(["a", "b"], 40)
    cohort = texts.step(["a", "b"])
    kept_bytes = sum(buffer.nbytes for buffers in cohort.buffers.values() for buffer in buffers)
    assert kept_bytes == 2 * cohort.capacity * len(LAYERS) * 2 * HEADS * PER_VECTOR
    copied_bytes = 2 * cohort.capacity * 2 * HEADS * DIM * 4
    assert texts.pool.allocated_bytes == kept_bytes + copied_bytes
    assert texts.pool.bytes_per_token == len(LAYERS) * 2 * HEADS * PER_VECTOR
    keys, values = cohort.update(*states_of("a", 0, 1, rows=2), 1)
    assert keys.nbytes + values.nbytes <= copied_bytes


def test_a_captured_step_keeps_and_reads_the_same(layers: ModelSpan) -> None:
    pools = [CachePool(layers, 1 << 24, kv=INT8_KV) for _ in range(2)]
    ordinary, captured = (Texts(pool, "a").step(["a"], 20) for pool in pools)
    keys, values = states_of("a", 20, 1)
    columns = StaticColumns(captured)
    columns.begin(captured)
    wanted = ordinary.update(keys, values, 1)
    found = columns.update(keys, values, 1)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[:, :, :21], other) and bool((one[:, :, 21:] == 0).all())
    for one, other in zip(captured.buffers[1], ordinary.buffers[1], strict=True):
        assert torch.equal(one[:, :, :21], other[:, :, :21])


def test_keys_and_values_may_have_other_widths() -> None:
    """As in multi-head latent attention."""
    keys, values = torch.randn(1, 2, 5, 24), torch.randn(1, 2, 5, 16)
    buffers = STORES[INT8_KV].allocate(keys, values, 1, 9)
    found = STORES[INT8_KV].write(buffers, keys.bfloat16(), values.bfloat16(), 0)
    for one, like in zip(found, (keys, values), strict=True):
        assert one.shape == like.shape and one.dtype is torch.bfloat16
        assert float((one.float() - like).abs().max()) < 0.03


# -- texts


def run(runner: StageRunner, session: Any, ids: Tensor) -> Tensor:
    return runner.run([StepInput(session, ids, WANT_ALL)])[0].output


def text_of(length: int, seed: int) -> Tensor:
    return torch.randint(0, 99, (1, length), generator=torch.Generator().manual_seed(seed))


def replayed(
    span: ModelSpan, chunk: int, behind: int = 0, last: Callable[[], None] = lambda: None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of three texts decoded together, with absences, in prompts cut into chunks; and of each text alone as one prompt."""
    runner = StageRunner(span, RunnerConfig(1 << 24, prefill_positions=chunk, kv=INT8_KV))
    texts = {name: text_of(behind + 60, seed) for seed, name in enumerate("abc")}
    for name in texts:
        runner.open(name, rows=1, max_length=behind + 60)
    said = {name: [run(runner, name, ids[:, : behind + 5 + 4 * at])] for at, (name, ids) in enumerate(texts.items())}
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        if step == 29:
            last()
        present = [name for name in texts if torch.rand(1, generator=generator) < 0.8] or ["a"]
        works = [StepInput(n, texts[n][:, runner.length(n) :][:, :1], WANT_ALL) for n in present]
        for name, result in zip(present, runner.run(works), strict=True):
            said[name].append(result.output)
    again = StageRunner(span, RunnerConfig(1 << 24, kv=INT8_KV))
    for name, ids in texts.items():
        found = torch.cat(said[name], 1)
        again.open(name, rows=1, max_length=behind + 60)
        yield found, run(again, name, ids[:, : found.shape[1]])


@pytest.mark.parametrize("chunk", [5, 64])
def test_a_text_is_the_same_in_any_company_and_after_a_replay(whole: ModelSpan, chunk: int) -> None:
    """But for a value that tips over to the next step, as sums have another order: few do in a small model."""
    for found, replay in replayed(whole, chunk):
        apart_T = (found - replay).abs().amax(-1)[0]
        assert float(apart_T.median()) < ROUNDED
        assert float(apart_T.max() / replay.std()) < 0.02


@pytest.mark.skipif(library() is None, reason="the package xllamacpp is not installed, or not for this machine")
@pytest.mark.parametrize("save", [save_llama_gguf, partial(save_moe_gguf, experts=32, width=4, used=4)])
def test_fast_products_give_the_same_bits(
    save: Callable[..., None], tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    """They add in one order in any company, so no value tips over. A mixture's routers are plain matrices."""
    file, folder = tmp_path / "tiny.gguf", tmp_path / "packed"
    save(file, form="Q4_0")
    from_checkpoint(str(file), folder, packs=True)
    checkpoint = Checkpoint(folder)
    span = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products=FAST)
    for chunk, behind in ((7, 0), (600, 1030)):
        for found, replay in replayed(span, chunk, behind, last=lambda: set_threads(2)):
            set_threads(1)
            assert torch.equal(found, replay)


def test_the_numbers_are_those_of_8_bits(whole: ModelSpan) -> None:
    """Near the plain cache's logits, and farther off than sums in another order: the prompt's own positions are rounded, too."""
    ids = text_of(48, 7)
    said = {}
    for kv in (PLAIN, INT8_KV):
        runner = StageRunner(whole, RunnerConfig(1 << 24, kv=kv))
        runner.open(0, rows=1, max_length=48)
        said[kv] = run(runner, 0, ids)
    apart = float((said[INT8_KV] - said[PLAIN]).abs().max() / said[PLAIN].std())
    assert 1e-4 < apart < 0.05


def test_twice_the_sessions_fit(layers: ModelSpan, checkpoint: Checkpoint) -> None:
    """Layers x 36 bytes and one plain layer, against layers + 1 plain ones: the more layers, the nearer to their ratio."""
    many = range(30)  # the sizes alone, of as many layers as SmolLM2 has
    family = layers.family
    by_layer = {name: getattr(family, name)[:1] * len(many) for name in ("cache_shapes", "state_shapes")}
    shapes = replace(family, **by_layer)
    span = ModelSpan(shapes, layers.model, 2, 4)
    sizes = {kv: CachePool(span, 1 << 24, kv=kv).bytes_of(many, 1, 100) for kv in (PLAIN, INT8_KV)}
    vector = 100 * 2 * HEADS  # of one layer
    assert sizes[PLAIN] == vector * 31 * DIM * 4
    assert sizes[INT8_KV] == vector * (30 * PER_VECTOR + DIM * 4)
