"""Experts in slots of memory: what stays, what is read, and what a bad disk does."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.compute.executor import is_device_fault
from swarmnode.compute.expert_slots import PAGE, PIECE_BYTES, ByteRange, ExpertSlots
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.packed_weight import PackedStack, PackedWeight, held_by
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import CheckpointError, LocalError, WeightsLost
from tests.compute.model.llama_gguf import save_moe_gguf
from tests.compute.packing.test_packed_weight import needs_ggml, pack

SIZE = 3 * PAGE + 17  # bytes of a matrix: no whole pages, and not at their beginning
FIRST = 32
EXPERTS = 12


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(FIRST) + b"".join(bytes([number]) * SIZE for number in range(2 * EXPERTS)))
    return path


Make = Callable[..., ExpertSlots]


@pytest.fixture
def make(file: Path) -> Iterator[Make]:
    """Make slots for one layer of experts with two matrices; `seen` has the bytes of each slot and matrix."""
    made: list[ExpertSlots] = []

    def make(
        slots: int, seen: dict[tuple[int, int], bytes], timeout_s: float = 20.0, wait: object = None
    ) -> ExpertSlots:
        def fill(_layer: int, slot: int, number: int, _place: int, piece: memoryview) -> None:
            if isinstance(wait, threading.Event):
                wait.wait(20)
            seen[slot, number] = bytes(piece)

        places = [
            [ByteRange(file, FIRST + at * SIZE, FIRST + (at + 1) * SIZE) for at in (expert, EXPERTS + expert)]
            for expert in range(EXPERTS)
        ]
        made.append(ExpertSlots([places], slots, fill, timeout_s=timeout_s))
        return made[-1]

    yield make
    for slots in made:
        slots.close()


def test_a_slot_has_the_bytes_of_its_expert_and_the_least_recent_goes(make: Make) -> None:
    seen: dict[tuple[int, int], bytes] = {}
    slots = make(3, seen)
    (layer,) = slots.layers
    hits, last = 0, dict.fromkeys(range(EXPERTS), -1)
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        wanted = sorted(set(torch.randint(EXPERTS, (2,), generator=generator).tolist()))
        held = set(layer.ready)
        here = [expert for expert in wanted if expert in held]
        hits += len(here)
        for place, (expert, slot) in enumerate(layer.visit(dict.fromkeys(wanted, 1))):
            assert (seen[slot, 0], seen[slot, 1]) == (bytes([expert]) * SIZE, bytes([EXPERTS + expert]) * SIZE)
            assert place >= len(here) or expert in here, "experts in memory come first"
        gone, stayed = held - set(layer.ready), held & set(layer.ready) - set(wanted)
        assert max(map(last.get, gone), default=-1) <= min(map(last.get, stayed), default=number)
        last.update(dict.fromkeys(wanted, number))
    assert slots.hits == hits > 0
    assert slots.read_bytes == 2 * SIZE * slots.reads


def test_of_equally_recent_experts_the_rarest_goes(make: Make) -> None:
    (layer,) = make(2, {}).layers
    assert [expert for expert, _ in layer.visit({4: 5, 7: 1})] != []
    list(layer.visit({1: 1}))
    assert set(layer.ready) == {1, 4}


@pytest.mark.parametrize("slots", [1, 3, EXPERTS])
def test_a_pass_may_need_more_experts_than_there_are_slots(make: Make, slots: int) -> None:
    seen: dict[tuple[int, int], bytes] = {}
    (layer,) = make(slots, seen).layers
    for _ in range(3):
        visited = [(expert, seen[slot, 1][0]) for expert, slot in layer.visit(dict.fromkeys(range(EXPERTS), 1))]
        assert sorted(visited) == [(expert, EXPERTS + expert) for expert in range(EXPERTS)]


def test_a_pass_that_ends_early_leaves_the_slots_usable(make: Make) -> None:
    (layer,) = make(2, {}).layers
    visit = layer.visit(dict.fromkeys(range(5), 1))
    next(visit)
    visit.close()
    assert [expert for expert, _ in layer.visit({9: 1})] == [9]


def test_a_matrix_is_read_in_pieces(tmp_path: Path) -> None:
    path, size, unit = tmp_path / "large.bin", 3 * PIECE_BYTES + 5, 700
    content = os.urandom(PAGE + size + 100)
    path.write_bytes(content)
    matrix, lengths = bytearray(size), []

    def fill(_layer: int, _slot: int, _number: int, place: int, piece: memoryview) -> None:
        matrix[place : place + len(piece)] = piece
        lengths.append(len(piece))

    slots = ExpertSlots([[[ByteRange(path, PAGE + 99, PAGE + 99 + size, unit)]]], 1, fill)
    list(slots.layers[0].visit({0: 1}))
    slots.close()
    assert matrix == content[PAGE + 99 : PAGE + 99 + size] and sum(lengths) == size
    *whole, last = sorted(lengths, reverse=True)
    assert {length % unit for length in whole} == {0} and last % unit == size % unit
    with pytest.raises(CheckpointError, match=r"large\.bin: rows of its experts are too long"):
        ExpertSlots([[[ByteRange(path, 0, size, PIECE_BYTES + 1)]]], 1, fill)


@pytest.mark.parametrize("change", ["cut", "written", "emptied", "grown"])
def test_a_file_that_changes_ends_the_span_with_a_sentence(make: Make, file: Path, change: str) -> None:
    (layer,) = make(2, {}).layers
    list(layer.visit({0: 1}))
    before = file.stat()
    if change == "cut":
        os.truncate(file, FIRST + SIZE)
    elif change == "emptied":
        file.write_bytes(b"")
    else:
        with file.open("r+b") as stream:
            stream.seek(before.st_size if change == "grown" else FIRST + 5 * SIZE)
            stream.write(b"?")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert [expert for expert, _ in layer.visit({0: 1})] == [0], "what is in memory stays right"
    for _ in range(2):
        with pytest.raises(WeightsLost, match=r"experts\.bin was changed or cut short") as caught:
            list(layer.visit({0: 1, 5: 1}))
    assert is_device_fault(caught.value), "the node cannot go on with these weights"


def test_a_file_that_is_replaced_stays_as_it_was(make: Make, file: Path, tmp_path: Path) -> None:
    seen: dict[tuple[int, int], bytes] = {}
    (layer,) = make(2, seen).layers
    other = tmp_path / "other"
    other.write_bytes(bytes(file.stat().st_size))
    other.replace(file)
    ((_, slot),) = layer.visit({5: 1})
    assert seen[slot, 0] == bytes([5]) * SIZE


def test_a_slow_disk_fails_the_pass_once_and_is_not_waited_for_again(make: Make) -> None:
    is_slow = threading.Event()
    slots = make(2, {}, timeout_s=0.05, wait=is_slow)
    (layer,) = slots.layers
    with pytest.raises(LocalError, match="did not give an expert of layer 0"):
        list(layer.visit({0: 1}))
    slots.timeout_s = 1000.0  # waiting again would end the test run
    with pytest.raises(LocalError, match="--expert-disk off"):
        list(layer.visit({1: 1}))
    is_slow.set()
    with slots._lock:
        assert slots._done.wait_for(lambda: not layer.reading, 20)
    assert [expert for expert, _ in layer.visit({0: 1, 1: 1})] == [0, 1]
    slots.close()
    with pytest.raises(WeightsLost, match="no longer read"):
        list(layer.visit({7: 1}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("mixture")
    save_moe_gguf(folder / "tiny.gguf", form="Q4_0", experts=EXPERTS)
    return pack(folder / "tiny.gguf", folder / "packed")


def conversation(span: ModelSpan) -> list[Tensor]:
    """Return the logits of two sessions: a prompt, company, a wrong guess that is taken back, and a replay of the text."""
    runner, found = StageRunner(span, RunnerConfig(cache_bytes=1 << 22)), list[Tensor]()
    ids_BT = torch.arange(60)[None] * 7 % 251

    def run(*works: StepInput) -> None:
        found.extend(result.output for result in runner.run(works))

    for session in range(3):
        runner.open(session, rows=1, max_length=64)
    run(StepInput(0, ids_BT[:, :20], WANT_ALL), StepInput(1, ids_BT[:, 30:33], WANT_ALL))
    run(StepInput(0, ids_BT[:, 20:21]), StepInput(1, ids_BT[:, 33:37], WANT_ALL, guessed=3))
    run(StepInput(0, ids_BT[:, 21:22]), StepInput(1, ids_BT[:, 40:41], truncate_to=4))
    run(StepInput(2, ids_BT[:, :22], WANT_ALL))
    return found


@needs_ggml
@pytest.mark.parametrize("products", ["fast", "exact"])
def test_the_place_of_an_expert_changes_no_bit(checkpoint: Checkpoint, products: str) -> None:
    settings = {"dtype": torch.float32, "products": products, "check": False}
    whole = conversation(load_span(checkpoint, 0, checkpoint.units, **settings))
    for slots in (1, EXPERTS // 4, EXPERTS):
        span = load_span(checkpoint, 0, checkpoint.units, expert_slots=slots, **settings)
        assert span.experts_on_disk is not None
        for own, expected in zip(conversation(span), whole, strict=True):
            assert torch.equal(own, expected)
        assert span.experts_on_disk.reads >= EXPERTS
        span.close()


@needs_ggml
@pytest.mark.parametrize("products", ["fast", "exact"])
def test_a_gradient_is_of_the_expert_that_a_pass_used(checkpoint: Checkpoint, products: str) -> None:
    """Although another one is in its slot by then."""
    x_BTH = torch.randn(1, 24, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    found = []
    for slots in (0, 3):
        span = load_span(checkpoint, 1, 3, dtype=torch.float32, products=products, expert_slots=slots, check=False)
        x = x_BTH.clone().requires_grad_()
        span.forward(x, cache=None).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        span.close()
    assert torch.equal(*found)


@needs_ggml
@pytest.mark.parametrize("slots", [0, 3])
def test_a_closed_span_keeps_no_expert(checkpoint: Checkpoint, slots: int) -> None:
    """Without a collection of garbage: the next span is loaded before."""
    gc.collect()
    gc.disable()
    try:
        span = load_span(checkpoint, 0, 2, dtype=torch.float32, products="fast", expert_slots=slots, check=False)
        parts = [weakref.ref(part) for weight in held_by(span.model) for part in parts_of(weight)]
        assert len(parts) > EXPERTS // 4
        span.close()
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()


def parts_of(weight: PackedWeight | PackedStack) -> list[object]:
    matrices = weight._matrices if isinstance(weight, PackedStack) else [weight]
    return [part for matrix in matrices for part in matrix._parts]


@needs_ggml
@pytest.mark.parametrize("form", ["Q4_0", "Q4_K"])
def test_a_node_with_experts_on_disk_has_the_bits_of_a_graph(tmp_path: Path, form: str) -> None:
    """A model that is large enough for torch's activations and norms to have other bits than ggml's; with 1 and 2 threads, and in
    a prompt that the graph with all experts computes expert by expert."""
    save_moe_gguf(tmp_path / "tiny.gguf", form=form, experts=16, width=4, used=4)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    ids_BT, threads = torch.arange(70)[None] * 7 % 251, torch.get_num_threads()
    found: list[list[Tensor]] = []
    try:
        for slots, count in ((0, 1), (4, 1), (4, 2)):
            torch.set_num_threads(count)
            settings = {"dtype": torch.float32, "products": "fast", "check": False, "expert_slots": slots}
            span = load_span(checkpoint, 0, checkpoint.units, **settings)
            runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 22))
            runner.open(0, rows=1, max_length=72)
            steps = (StepInput(0, ids_BT, WANT_ALL), StepInput(0, ids_BT[:, :1]))
            found.append([*conversation(span), *(runner.run([step])[0].output for step in steps)])
            assert runner.graphs is not None and runner.graphs.passes == 2, runner.graphs.refusals
            found[-1] += [experts_NK.clone() for experts_NK in runner.graphs.chosen]
            assert len(found[-1]) == 7 + 2 + 2, "the experts of both layers are counted, wherever they lie"
            span.close()
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@needs_ggml
def test_an_expert_with_nan_is_refused_when_it_is_read(tmp_path: Path) -> None:
    save_moe_gguf(tmp_path / "tiny.gguf", form="Q8_0", experts=4)
    checkpoint = pack(tmp_path / "tiny.gguf", tmp_path / "packed")
    entry = checkpoint.entries["model.layers.1.mlp.experts.down_proj"]
    with entry.file.open("r+b") as stream:
        for expert in range(4):
            stream.seek(entry.begin + expert * entry.nbytes // 4)
            stream.write(b"\xff\x7f")
    span = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, products="fast", expert_slots=2, check=False)
    with pytest.raises(WeightsLost, match="no finite numbers"):
        conversation(span)
    span.close()
