"""Learners: what is counted once, what is thrown away, and what goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.block import Block
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError, UsageError
from tests.compute.training.conftest import (
    MICROBATCHES,
    commit_all,
    ids_of,
    learners,
    make_run,
    pass_through,
    train,
)
from tests.compute.training.toy import FEATURES, ToySegment, toy_values

WHOLE, THREE = (0, 5), (0, 2, 4, 5)
Get = Callable[[str], Checkpoint]


def toy(
    *, start: int = 0, end: int = 3, breaks: int | None = None, recompute: bool = False, **changes: object
) -> Learner:
    return Learner(ToySegment(start, end, breaks=breaks), make_run(**changes), recompute=recompute)


def count(learner: Learner, index: int) -> float:
    """One microbatch of a toy that holds all units."""
    (loss,) = learner.forward(index, index, 0, 3, *toy_values(index))
    learner.backward(index, ())
    return float(loss)


def gradient(learner: Learner, blocks: Sequence[int] | None = None) -> Tensor:
    return learner.gradient(learner.blocks if blocks is None else blocks).copy()


def test_the_loss_of_a_microbatch_is_unscaled_and_its_gradient_is_a_share_of_the_step() -> None:
    learner, segment = toy(), ToySegment()
    (loss,) = segment.forward(toy_values(1).inputs, 0, 3, 0, toy_values(1).labels)
    loss.backward()
    assert count(learner, 1) == pytest.approx(float(loss.detach()))
    weight = segment.modules[0].weight.grad
    assert weight is not None
    flat = learner.gradient([0]).copy()  # bias, then weight: names in order
    torch.testing.assert_close(flat[FEATURES:].view(FEATURES, FEATURES), weight / MICROBATCHES)


def test_counted_masks_and_in_flight() -> None:
    learner = toy()
    learner.forward(1, 2, 0, 3, *toy_values(2))
    assert (learner.in_flight, learner.counted) == (1, {0: 0, 1: 0, 2: 0})
    learner.backward(1, ())
    assert (learner.in_flight, learner.counted) == (0, {0: 4, 1: 4, 2: 4})
    values = learner.forward(2, 0, 0, 2, *toy_values(0))
    learner.backward(2, (torch.ones_like(values[0]),))
    assert learner.counted == {0: 5, 1: 5, 2: 4}


def test_a_replay_adds_nothing_and_lets_gradients_flow() -> None:
    learner = toy()
    inputs = learner.forward(1, 0, 0, 1, *toy_values(0))
    labels = toy_values(0).labels
    outputs = learner.forward(2, 0, 1, 3, inputs, labels)
    assert outputs[0].dim() == 0
    (first,) = learner.backward(2, ())
    learner.backward(1, (first,))
    assert first is not None
    before = gradient(learner)
    learner.forward(3, 0, 1, 3, inputs, labels)
    (again,) = learner.backward(3, ())
    assert torch.equal(again, first)
    assert torch.equal(gradient(learner), before)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_replay_at_the_front_has_no_gradients_to_give(recompute: bool) -> None:
    learner = toy(end=2, recompute=recompute)
    for lease in (1, 2):
        values = learner.forward(lease, 0, 0, 2, *toy_values(0))
        assert learner.backward(lease, (torch.ones_like(values[0]),)) == (None,)
    assert gradient(learner).norm() > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 3), (1, 2), (0, 1)])
def test_an_index_that_some_units_counted_is_counted_by_the_others_alone(start: int, end: int, recompute: bool) -> None:
    whole, learner = toy(), toy(recompute=recompute)
    inputs, labels = toy_values(0)
    inside = whole.forward(1, 0, 0, start, inputs) if start else inputs
    whole.drop(1)
    values = learner.forward(1, 0, start, end, inside, labels)
    ones = () if end == 3 else (torch.ones_like(values[0]),)
    learner.backward(1, ones)
    before = gradient(learner, range(start, end))
    for each in (whole, learner):
        each.forward(2, 0, 0, 3, *toy_values(0))
        each.backward(2, ())
    assert torch.equal(gradient(learner, range(start, end)), before)
    others = [unit for unit in range(3) if not start <= unit < end]
    assert torch.equal(gradient(learner, others), gradient(whole, others))
    assert set(learner.counted.values()) == {1}


def test_an_index_that_some_units_count_meanwhile_is_refused() -> None:
    learner = toy()
    learner.forward(2, 0, 0, 3, *toy_values(0))
    values = learner.forward(1, 0, 0, 2, *toy_values(0))
    learner.backward(1, (torch.ones_like(values[0]),))
    before = gradient(learner)
    with pytest.raises(ValueError, match="for some of the layers"):
        learner.backward(2, ())
    assert torch.equal(gradient(learner), before)


def test_leases_and_indices_that_cannot_be() -> None:
    learner = toy(end=2)
    learner.forward(1, 0, 0, 2, *toy_values(0))
    for lease, index, start, end, text in [
        (1, 1, 0, 2, "lease 1 is in flight"),
        (2, MICROBATCHES, 0, 2, "no microbatch 3"),
        (2, -1, 0, 2, "no microbatch -1"),
        (2, 0, 0, 3, "not among"),
        (2, 0, 1, 1, "not among"),
    ]:
        with pytest.raises(ValueError, match=text):
            learner.forward(lease, index, start, end, *toy_values(0))
    learner.drop(1)
    learner.drop(1)
    with pytest.raises(ValueError, match="lease 1 is not in flight"):
        learner.backward(1, ())
    assert learner.in_flight == 0


def test_gradients_that_do_not_fit_are_refused_before_anything_counts() -> None:
    learner = toy(end=2)
    for lease, grads, error in [
        (1, (torch.ones(3, 3),), ProtocolError),
        (2, (torch.ones(8, FEATURES), None), ProtocolError),
        (3, (torch.full((8, FEATURES), torch.nan),), NotFinite),
    ]:
        learner.forward(lease, 0, 0, 2, *toy_values(0))
        with pytest.raises(error):
            learner.backward(lease, grads)
    assert learner.counted == {0: 0, 1: 0} and gradient(learner).norm() == 0


def test_discard_forgets_the_step() -> None:
    learner = toy()
    count(learner, 0)
    learner.forward(5, 1, 0, 3, *toy_values(1))
    learner.discard()
    assert (learner.in_flight, set(learner.counted.values())) == (0, {0})
    assert gradient(learner).norm() == 0
    assert len(learner.gradient(learner.blocks)) == sum(shape.numel() for shape in learner.shapes(learner.blocks))
    fresh = toy()
    assert count(learner, 0) == count(fresh, 0)
    assert torch.equal(gradient(learner), gradient(fresh))


def test_failing_backward_counts_nothing_at_all() -> None:
    learner = toy()
    count(learner, 0)
    values = learner.forward(1, 1, 0, 2, *toy_values(1))
    with torch.no_grad():
        learner.segment.modules[1].weight.mul_(1)  # the kept graph is spoilt
    with pytest.raises(RuntimeError):
        learner.backward(1, (torch.ones_like(values[0]),))
    assert set(learner.counted.values()) == {0} and gradient(learner).norm() == 0


def test_recomputing_equals_keeping_graphs(checkpoint: Get) -> None:
    run = make_run()
    kept, recomputed = (learners(checkpoint("gpt2-dropout"), run, THREE, recompute=flag) for flag in (False, True))
    assert train(kept, 3) == train(recomputed, 3)
    for one, other in zip(kept, recomputed, strict=True):
        for block in one.blocks:
            assert all(torch.equal(tensor, other.state(block)[name]) for name, tensor in one.state(block).items())


def test_replays_and_order_do_not_show(checkpoint: Get) -> None:
    run = make_run()
    plain, disturbed = (learners(checkpoint("gpt2-dropout"), run, THREE) for _ in range(2))
    losses = {index: pass_through(plain, index) for index in range(MICROBATCHES)}
    for index in (2, 0, 2, 1, 0):
        assert pass_through(disturbed, index) == losses[index]
    for one, other in zip(plain, disturbed, strict=True):
        torch.testing.assert_close(gradient(one), gradient(other), rtol=1e-5, atol=1e-7)


def test_replicas_sum_to_the_whole(checkpoint: Get) -> None:
    run = make_run()
    (whole,) = learners(checkpoint("llama"), run, WHOLE)
    replicas = [learners(checkpoint("llama"), run, WHOLE)[0] for _ in range(2)]
    for index in range(MICROBATCHES):
        pass_through([whole], index)
        pass_through([replicas[index % 2]], index)
    groups = [(0, 1), (2, 3, 4)]
    sums = {blocks: gradient(replicas[0], blocks) + gradient(replicas[1], blocks) for blocks in groups}
    squares = [replicas[0].squared_norm(blocks, flat) for blocks, flat in sums.items()]
    assert sum(squares) == pytest.approx(whole.squared_norm(whole.blocks), rel=1e-5)
    for replica in replicas:
        replica.commit({blocks: flat.clone() for blocks, flat in sums.items()}, sum(squares) ** 0.5)
    commit_all([whole])
    assert [replica.step for replica in replicas] == [1, 1]
    for block in whole.blocks:
        for name, tensor in whole.state(block).items():
            assert torch.equal(replicas[0].state(block)[name], replicas[1].state(block)[name])
            torch.testing.assert_close(replicas[0].state(block)[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_sum_of_another_length_changes_nothing() -> None:
    learner = toy()
    count(learner, 0)
    before = learner.state(0)["parameter/weight"].clone()
    with pytest.raises(ValueError, match="a flat gradient of shape"):
        learner.commit({(0, 1): torch.zeros(3)}, 1.0)
    assert learner.step == 0 and torch.equal(learner.state(0)["parameter/weight"], before)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_state_goes_on_bit_for_bit(checkpoint: Get, optimizer: str) -> None:
    run = make_run(optimizer=optimizer, momentum=0.9, learning_rate=0.01)
    chain = learners(checkpoint("gpt2-dropout"), run, THREE)
    train(chain, 3)
    saved = [{b: {n: t.clone() for n, t in learner.state(b).items()} for b in learner.blocks} for learner in chain]
    expected = train(chain, 3)
    heir = learners(checkpoint("gpt2-dropout"), run, THREE)
    for learner, states in zip(heir, saved, strict=True):
        for block, tensors in states.items():
            learner.load(block, tensors)
        learner.step = 3
    assert train(heir, 3) == expected


def test_only_float32_is_trained() -> None:
    segment = ToySegment()
    segment.modules[1].to(torch.bfloat16)
    with pytest.raises(UsageError, match="not float32"):
        Learner(segment, make_run())


def test_names_of_a_state() -> None:
    names = set(toy().state(1))
    own = {
        f"{kind}/{name}" for kind in ("parameter", "adamw/exp_avg", "adamw/exp_avg_sq") for name in ("weight", "bias")
    }
    assert names == own | {"buffer/running_mean", "buffer/running_var", "buffer/num_batches_tracked"}
    assert set(toy(optimizer="sgd").state(0)) == {"parameter/weight", "parameter/bias"}


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    learner = toy()
    good = {name: torch.zeros_like(tensor) for name, tensor in learner.state(0).items()}
    before = learner.state(0)["parameter/weight"].clone()
    missing = {name: tensor for name, tensor in good.items() if name != "parameter/bias"}
    misshapen = {**good, "parameter/weight": torch.zeros(2)}
    for tensors, text in [
        (missing, "lacks tensor parameter/bias"),
        (misshapen, "of shape"),
        ({**good, "x": good["parameter/bias"]}, "unknown tensor x"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            learner.load(0, tensors)
    assert torch.equal(learner.state(0)["parameter/weight"], before)


def test_what_is_not_finite_is_told_with_its_unit() -> None:
    learner = toy(breaks=1)
    with pytest.raises(NotFinite, match="layer 1, step 0") as caught:
        learner.forward(1, 0, 0, 3, *toy_values(0))
    assert (caught.value.unit, learner.in_flight) == (1, 0)
    (x_BF,), labels = toy_values(0)
    with pytest.raises(NotFinite, match="came in at the boundary before layer 1"):
        toy().forward(1, 0, 1, 3, (x_BF * torch.inf,), labels)
    fine = toy()
    count(fine, 0)
    weight = next(iter(fine.segment.parameters()[2].values()))
    assert weight.grad is not None
    weight.grad[0] = torch.nan
    with pytest.raises(NotFinite, match="layer 2") as caught:
        fine.squared_norm(fine.blocks)
    assert caught.value.unit == 2
    with pytest.raises(NotFinite):
        fine.commit({}, torch.nan)
    assert fine.step == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_move_once_per_step_by_the_mean_of_its_microbatches(recompute: bool) -> None:
    learner = toy(recompute=recompute)
    names = ("running_mean", "running_var", "num_batches_tracked")
    expected = []
    for index in range(MICROBATCHES):
        segment = ToySegment()
        segment.forward(toy_values(index).inputs, 0, 3, 0, toy_values(index).labels)
        expected.append([segment.buffers()[1][name].double() for name in names])
    state = learner.state(1)
    before = [state[f"buffer/{name}"].clone() for name in names]
    for lease, index in enumerate((2, 0, 2, 1, 2)):
        values = learner.forward(lease, index, 0, 2, *toy_values(index))
        learner.backward(lease, (torch.ones_like(values[0]),))
    learner.forward(9, 1, 0, 2, *toy_values(1))
    assert all(torch.equal(state[f"buffer/{name}"], old) for name, old in zip(names, before, strict=True))
    learner.commit({}, 1.0)
    for name, values in zip(names, zip(*expected, strict=True), strict=True):
        mean = torch.stack(values).mean(0)
        torch.testing.assert_close(state[f"buffer/{name}"].double(), mean, rtol=1e-5, atol=1e-6)


def test_replicas_keep_equal_statistics() -> None:
    whole, *replicas = (toy() for _ in range(3))
    for index in range(MICROBATCHES):
        count(whole, index)
        count(replicas[index % 2], index)
    blocks = (0, 1, 2)
    total = gradient(replicas[0], blocks) + gradient(replicas[1], blocks)
    norm = replicas[0].squared_norm(blocks, total) ** 0.5
    assert norm == pytest.approx(whole.squared_norm(blocks) ** 0.5, rel=1e-5)  # statistics are no gradient
    for replica in replicas:
        replica.commit({blocks: total.clone()}, norm)
    whole.commit({}, norm)
    for name in ("buffer/running_mean", "buffer/running_var", "buffer/num_batches_tracked"):
        assert torch.equal(replicas[0].state(1)[name], replicas[1].state(1)[name])
        torch.testing.assert_close(replicas[0].state(1)[name], whole.state(1)[name])


def test_recomputing_runs_unit_by_unit_and_keeps_the_heads_graph() -> None:
    learner = toy(recompute=True)
    segment = learner.segment
    assert isinstance(segment, ToySegment)
    count(learner, 0)
    assert segment.passes == 3 + 2
    values = learner.forward(1, 1, 0, 2, *toy_values(1))
    learner.backward(1, (torch.ones_like(values[0]),))
    assert segment.passes == 5 + 2 + 2


def test_what_is_handed_out_is_detached(checkpoint: Get) -> None:
    first, *_ = learners(checkpoint("llama"), make_run(), THREE)
    (hidden_BTH,) = first.forward(1, 0, 0, 2, (ids_of(0, 0),))
    assert not hidden_BTH.requires_grad


def test_repr() -> None:
    learner = toy()
    count(learner, 1)
    assert repr(learner) == "Learner(step 0, units [0:3), 1 to 1 of 3 microbatches counted, 0 in flight)"


def test_the_norm_of_gradients_whose_squares_overflow_float32_is_known() -> None:
    block = Block(0, {"w": nn.Parameter(torch.ones(1 << 16))}, {}, make_run(), torch.device("cpu"))
    block.sums_N.fill_(2.0**56)
    assert block.squared_norm(block.sums_N, 0) == 2.0**128
