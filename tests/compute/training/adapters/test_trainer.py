"""Trainers of adapters on one machine: what they count, keep, take back and refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from swarmnode.compute.executor import ByPiece
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters import layers
from swarmnode.compute.training.adapters import layers as starts
from swarmnode.compute.training.adapters import layers as trained_changes
from swarmnode.compute.training.adapters.adapter_recipe import METHODS
from swarmnode.compute.training.adapters.adapter_trainer import LONG, PIECE_POSITIONS, SavedStorage
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError, UsageError
from swarmnode.ledger import Account, Full
from tests.compute.training.adapters.trained import SMALL, Route, WholeTrainer, batch_of, labels_of

RATE = 1e-2
T = TypeVar("T")
Get = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def llama(checkpoint: Get) -> Checkpoint:
    return checkpoint("llama")


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["lora-fa", "dora", "prompt"])
def test_states_go_on_in_other_spans_bit_for_bit(llama: Checkpoint, method: str) -> None:
    recipe = replace(SMALL, method=method)
    route = Route.through(llama, [0, 2, llama.units], recipe)
    route.train(range(2))
    state = {name: tensor.clone() for trainer in route.trainers for name, tensor in trainer.state().items()}
    other = Route.through(llama, [0, 3, llama.units], recipe)
    other.gradients(batch_of(7))  # is forgotten
    for trainer in other.trainers:
        trainer.load(state)
    assert other.train(range(2, 4)) == route.train(range(2, 4))
    assert same(other.weights(), route.weights())


def test_trainers_and_sessions_share_a_span_without_a_trace_of_one_another(llama: Checkpoint) -> None:
    def routes(*names: str) -> list[Route]:
        span = load_span(llama, 0, llama.units, check=False)
        recipes = [replace(SMALL, seed=seed, method=method) for seed, method in enumerate(names)]
        return [Route([WholeTrainer(span, one, name=f"tuned {one.seed}")], one) for one in recipes]

    alone = routes("lora", "dora")[1].train(range(2))
    first, second = routes("lora", "dora")
    trainer, ids_BS = first.trainers[0], batch_of(0)[0][0]
    with torch.inference_mode():
        served = trainer.span.forward(ids_BS, cache=None)
    losses = []
    for step in range(2):
        passing = trainer.forward_by_piece(9, batch_of(3)[0][0])
        next(passing)  # waits in the middle
        losses.append(second.gradients(batch_of(step)))
        with torch.inference_mode():
            assert torch.equal(trainer.span.forward(ids_BS, cache=None), served)
        second.update(step, RATE)
        passing.close()
    assert losses == alone
    assert trainer.in_flight == 0


def test_a_pass_that_evaluates_has_the_loss_and_leaves_nothing(llama: Checkpoint) -> None:
    (trainer,) = Route.through(llama, [0, llama.units], SMALL).trainers
    ids_BS, labels_BS = batch_of(0)[0]
    trainer.forward(0, ids_BS)
    trained = trainer.loss(0, labels_BS, 0.5)
    trainer.forward(1, ids_BS, evaluates=True)
    assert trainer.loss(1, labels_BS, 1.0) == trained
    assert trained[1] == labels_of([(ids_BS, labels_BS)], SMALL)
    assert trainer.in_flight == 1
    assert trainer.gradient_square() == 0


def test_rows_of_several_documents_train_as_the_documents_alone(llama: Checkpoint) -> None:
    (trainer,) = Route.through(llama, [0, llama.units], SMALL).trainers
    ids_BS = batch_of(0)[0][0][:1]
    positions_BS = torch.tensor([[*range(5), *range(7)]])
    labels_BS = ids_BS.masked_fill(positions_BS == 0, -100)
    trainer.forward(0, ids_BS, positions_BS)
    together, count = trainer.loss(0, labels_BS, 1.0)
    apart = 0.0
    for number, part in enumerate((slice(0, 5), slice(5, 12)), start=1):
        trainer.forward(number, ids_BS[:, part], evaluates=True)
        apart += trainer.loss(number, labels_BS[:, part], 1.0)[0]
    assert count == 10 and together == pytest.approx(apart, rel=1e-5)


def test_gradients_that_are_no_numbers_are_not_counted(llama: Checkpoint) -> None:
    first, last = Route.through(llama, [0, 2, llama.units], SMALL).trainers
    ids_BS, labels_BS = batch_of(0)[0]
    last.forward(0, first.forward(0, ids_BS))
    last.loss(0, labels_BS, 0.01)
    back_BTH = last.backward(0)
    assert back_BTH is not None
    square = last.gradient_square()
    with pytest.raises(NotFinite):
        first.backward(0, back_BTH * float("nan"))
    assert first.gradient_square() == 0 and first.in_flight == 0
    with pytest.raises(NotFinite):
        last.forward(1, torch.full((2, 12, 32), float("inf")))
    next(iter(last._weights.tensors.values())).data.fill_(float("nan"))  # as after a step that diverged
    with pytest.raises(NotFinite):
        last.forward(2, torch.ones(2, 12, 32))
    assert last.gradient_square() == square and last.in_flight == 0


def test_what_does_not_fit_is_refused_and_changes_nothing(llama: Checkpoint) -> None:
    first, last = Route.through(llama, [0, 2, llama.units], SMALL).trainers
    ids_BS, labels_BS = batch_of(0)[0]
    hidden_BTH = first.forward(0, ids_BS)
    last.forward(0, hidden_BTH)
    state = copied(last.state())
    for wrong, text in (
        (lambda: first.forward(0, ids_BS), "in flight already"),
        (lambda: first.forward(1, ids_BS + 1000), "another tokenizer"),
        (lambda: last.forward(1, hidden_BTH[:, :, :3]), "wrong dtype or shape"),
        (lambda: first.backward(0), "if and only if the head is here"),
        (lambda: first.backward(0, hidden_BTH[:1]), "has the shape"),
        (lambda: first.loss(0, labels_BS, 1.0), "does not wait for its loss"),
        (lambda: last.loss(0, labels_BS[:, 1:], 1.0), "the labels have the shape"),
        (lambda: last.loss(0, labels_BS, float("nan")), "share"),
        (lambda: last.backward(5), "does not wait for its gradient"),
        (lambda: last.backward(0, hidden_BTH), "if and only if the head is here"),
        (lambda: last.step(3, RATE, 1.0), "an update after 3 steps"),
        (lambda: last.step(0, float("inf"), 1.0), "must be from 0 on"),
    ):
        with pytest.raises(ProtocolError, match=text):
            wrong()
    bad = {**state, "weight/model.layers.1.mlp.up_proj.lora_B.weight": torch.full((48, 4), float("nan"))}
    for wrong_state, text in ((first.state(), "lacks"), (bad, "NaN or infinity")):
        with pytest.raises(CheckpointError, match=text):
            last.load(wrong_state)
    assert same(last.state(), state)


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_in_the_ledger_before_it_is_taken_and_returned_at_the_end(llama: Checkpoint, method: str) -> None:
    recipe = replace(SMALL, method=method)
    (trainer,) = Route.through(llama, [0, llama.units], recipe).trainers
    ledger = trainer.span.adapters.ledger
    idle = ledger.accounts()
    prompt = recipe.prompt_tokens if method == "prompt" else 0
    ids_BS = torch.arange(90).view(2, 45)
    said = trainer.activation_bytes(2, 45 + prompt)
    kept = SavedStorage([*trainer.span.model.parameters(), *trainer._weights.tensors.values()])
    with kept.watching():
        trainer.forward(0, ids_BS)
    assert 0.95 * kept.size_bytes < said < 1.3 * kept.size_bytes
    assert ledger.accounts()[Account.ACTIVATIONS] >= said
    trainer.forget(0)
    assert ledger.accounts() == idle
    ledger.limit_bytes = ledger.used_bytes
    with pytest.raises(Full):
        trainer.forward(0, ids_BS)
    with pytest.raises(Full):
        WholeTrainer(trainer.span, recipe, name="more")
    assert ledger.accounts() == idle and "more" not in trainer.span.adapters
    trainer.close()
    assert ledger.used_bytes == 0


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_the_base_may_be_smaller(llama: Checkpoint, form: str) -> None:
    """The losses are near those of the base in float32, and fall."""
    options = {"dtype": torch.bfloat16} if form == "bfloat16" else {"quantize": form}
    losses = Route.through(llama, [0, 2, llama.units], SMALL, **options).train(range(5))
    assert losses == pytest.approx(Route.through(llama, [0, 2, llama.units], SMALL).train(range(5)), rel=0.05)
    assert losses[4] < losses[0]


def test_lora_fa_keeps_three_quarters_of_lora_s_activations(tmp_path_factory: pytest.TempPathFactory) -> None:
    """At rank 16, in a Llama with the proportions of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("proportions")
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99, eos_token_id=None)).save_pretrained(
        folder
    )
    span = load_span(Checkpoint(folder), 0, 3, check=False)
    recipe = replace(SMALL, rank=16)
    lora, lora_fa = (
        WholeTrainer(span, replace(recipe, method=method), name=method).activation_bytes(1, 512)
        for method in ("lora", "lora-fa")
    )
    assert 0.5 * lora < lora_fa <= 0.75 * lora


def test_lora_fa_prepares_its_updates_layer_by_layer(llama: Checkpoint) -> None:
    """So sessions go on in between, and no layer takes long."""
    recipe = replace(SMALL, method="lora-fa")
    prepared, other = (Route.through(llama, [0, llama.units], recipe) for _ in range(2))
    assert len([*prepared.trainers[0].prepare_by_piece()]) == len(prepared.trainers[0]._layers.frozen) > 1
    assert [*prepared.trainers[0].prepare_by_piece()] == [], "once is enough"
    assert prepared.train(range(2)) == other.train(range(2))
    with pytest.raises(UsageError, match="at most 512"):
        replace(recipe, rank=513)


class Watched:
    """Positions that go through a layer in each piece of a work."""

    def __init__(self, span: ModelSpan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.positions: list[int] = [0]
        forward = ModelSpan.forward

        def watch(span: ModelSpan, x: Tensor, **options: Any) -> Tensor:
            start, end = max(1, options["start"]), min(options["end"], span.family.units - 1)  # the layers
            self.positions[-1] += x.shape[0] * x.shape[1] * max(0, end - start)
            return forward(span, x, **options)

        monkeypatch.setattr(ModelSpan, "forward", watch)

    def drain(self, work: ByPiece[T]) -> T:
        while True:
            self.positions.append(0)
            try:
                next(work)
            except StopIteration as ended:
                result: T = ended.value
                return result


@pytest.mark.parametrize(("rows", "length"), [(64, 8), (7, 5), (16, 2), (2, 45), (1, 45)])
@pytest.mark.parametrize("method", METHODS)
def test_a_pass_goes_by_pieces_of_few_positions_and_gives_what_a_whole_one_gives(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, method: str, rows: int, length: int
) -> None:
    recipe, most = replace(SMALL, method=method), 40
    ids_BS = torch.arange(rows * length).view(rows, length) % 90
    found = []
    for bound in (1 << 20, most):
        monkeypatch.setitem(PIECE_POSITIONS, "cpu", bound)
        first, last = Route.through(llama, [0, 2, llama.units], recipe).trainers
        with monkeypatch.context() as patch:
            watched = Watched(first.span, patch)
            hidden_BTH = watched.drain(first.forward_by_piece(0, ids_BS))
            watched.drain(last.forward_by_piece(0, hidden_BTH))
            loss, _ = watched.drain(last.loss_by_piece(0, ids_BS, 1 / rows / length))
            watched.drain(first.backward_by_piece(0, watched.drain(last.backward_by_piece(0))))
        squares = [one.gradient_square() for one in (first, last)]
        for one in (first, last):
            one.step(0, RATE, 1.0)
        found.append((loss, squares, torch.cat([one.flatten() for one in (*first.weights().values(),)])))
        prompt = recipe.prompt_tokens if method == "prompt" else 0
        assert max(watched.positions) <= max(bound, length + prompt, LONG + prompt)
    (whole, squares, weights_N), (cut, squares_cut, cut_N) = found
    assert cut == pytest.approx(whole, rel=1e-6) and squares_cut == pytest.approx(squares, rel=1e-4)
    assert torch.allclose(cut_N, weights_N, atol=RATE / 5, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_starts_and_updates_go_by_pieces_of_few_elements_bit_for_bit(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also those of single matrices."""
    recipe, counts, states = replace(SMALL, method=method), [], []
    for elements in (1 << 22, 100):
        monkeypatch.setattr(layers, "PIECE_ELEMENTS", elements)
        monkeypatch.setattr(starts, "PIECE_ELEMENTS", elements)
        monkeypatch.setattr(trained_changes, "PIECE_PRODUCTS", elements)
        span = load_span(llama, 0, llama.units, check=False)
        trainer = WholeTrainer(span, recipe, name="by piece")
        trained = sum(tensor.numel() for tensor in trainer._weights.tensors.values())
        count = [len([*trainer.start_by_piece()])]
        ids_BS, labels_BS = batch_of(0)[0]
        trainer.forward(0, ids_BS)
        trainer.loss(0, labels_BS, 0.1)
        trainer.backward(0)
        count += [len([*work]) for work in (trainer.gradient_square_by_piece(), trainer.step_by_piece(0, RATE, 1.0))]
        state = copied(trainer.state())
        count.append(len([*trainer.load_by_piece(state)]))
        assert same(copied(trainer.state()), state)
        counts.append(count)
        states.append(state)
    assert all(many >= trained // 100 for many in counts[1][1:]) and max(counts[0][1:]) <= 9 + 2 * len(trainer._changes)
    assert counts[1][0] >= 2 * counts[0][0] or method == "prompt"
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
