"""Muon, Lion and schedule-free AdamW against their authors' formulas, and whether stages compute them as one process does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.optimizer import Optimizer, memory_bytes
from swarmnode.compute.training.update_rules import COEFFICIENTS, ITERATIONS, LayerWatch, newest_share, orthogonalize
from swarmnode.swarm.records.run import RECIPE, ParameterGroup, Recipe, Run, check_run
from tests.compute.training.conftest import MICROBATCHES, commit_all, learners, make_run, pass_through, train
from tests.compute.training.toy import CLASSES, FEATURES, ToySegment, toy_values

SHAPES = {
    "layer.weight": (6, 10),
    "layer.tall": (9, 4),
    "conv.weight": (4, 2, 3, 3),
    "mlp.experts.gate_up_proj": (3, 4, 5),
    "layer.bias": (6,),
    "norm.weight": (5,),
    "embed_tokens.weight": (7, 5),
    "lm_head.weight": (7, 5),
}
MATRICES = ("layer.weight", "layer.tall", "conv.weight", "mlp.experts.gate_up_proj")
RULES = {
    "muon": {"momentum": 0.95},
    "lion": {"betas": (0.9, 0.99)},
    "schedule-free": {"betas": (0.9, 0.999), "schedule": "constant"},
}
EVA: dict[str, Any] = {
    "optimizer": "eva",
    "betas": (0.9, 0.05),
    "epsilon": 0.03,
    "clip": 1e-3,
    "momentum": 0.9,
    "learning_rate": 0.05,
}
STEPS = 6


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def updated(run: Run, steps: int = STEPS) -> dict[str, nn.Parameter]:
    """The parameters after some steps."""
    own = parameters()
    optimizer = Optimizer(own, run)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        optimizer.update(step)
    return own


def flat(name: str, tensor: Tensor) -> list[Tensor]:
    return list(tensor) if "experts" in name else [tensor.reshape(len(tensor), -1)]


def test_muon_is_that_of_torch_with_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", Tensor.clone)
    run = make_run(optimizer="muon", **RULES["muon"])
    own, theirs = updated(run), parameters()
    matrices = {name: [nn.Parameter(one.clone()) for one in flat(name, theirs[name].detach())] for name in MATRICES}
    settings: dict[str, Any] = {"weight_decay": run.weight_decay, "momentum": run.momentum}
    reference = torch.optim.Muon(
        [one for named in matrices.values() for one in named], adjust_lr_fn="match_rms_adamw", **settings
    )
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            for one, part in zip(matrices.get(name, []), flat(name, gradient), strict=False):
                one.grad = part.clone()
        for group in reference.param_groups:
            group["lr"] = run.learning_rate_at(step)
        reference.step()
    for name, named in matrices.items():
        expected = torch.stack([*named]) if "experts" in name else named[0].view(SHAPES[name])
        torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-5)


def test_muon_leaves_the_rest_to_adamw() -> None:
    muon, adamw = (updated(make_run(optimizer=name, momentum=0.95)) for name in ("muon", "adamw"))
    assert {name for name in SHAPES if torch.equal(muon[name], adamw[name])} == SHAPES.keys() - set(MATRICES)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (4, 4)])
def test_orthogonalize_maps_singular_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonalize(matrix).double(), u @ values.diag() @ v, rtol=1e-4, atol=1e-5)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_lion_is_its_authors() -> None:
    run = make_run(optimizer="lion", **RULES["lion"])
    own, theirs = updated(run), parameters()
    means = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        rate = run.learning_rate_at(step)
        for name, gradient in gradients(step).items():
            update = torch.sign(means[name] * 0.9 + gradient * 0.1)
            decay = run.treat(name, len(SHAPES[name])).weight_decay
            theirs[name].data -= rate * (update + decay * theirs[name].data)
            means[name] = means[name] * 0.99 + gradient * 0.01
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [STEPS, 40], ids=["all steps: x", "in between: y"])
def test_schedule_free_is_its_authors(steps: int) -> None:
    run = make_run(optimizer="schedule-free", steps=steps, **RULES["schedule-free"])
    own = updated(run)
    beta, beta_sq = run.betas
    for name, start in parameters().items():
        x = z = y = start.detach().double()
        square, total = torch.zeros_like(x), 0.0
        decay = run.treat(name, x.dim()).weight_decay
        for step in range(STEPS):
            rate, gradient = run.learning_rate_at(step), gradients(step)[name].double()
            square = beta_sq * square + (1 - beta_sq) * gradient**2
            z = z - rate * (gradient / ((square / (1 - beta_sq ** (step + 1))).sqrt() + run.epsilon) + decay * y)
            total += rate**2
            x = x + rate**2 / total * (z - x)
            y = (1 - beta) * z + beta * x
        torch.testing.assert_close(own[name].double(), x if steps == STEPS else y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "hf-constant"])
def test_the_newest_share_is_that_of_squared_rates(schedule: str, warmup: int) -> None:
    run = make_run(optimizer="schedule-free", schedule="recipe", recipe=Recipe(schedule), warmup_steps=warmup)
    check_run(run)
    total = 0.0
    for step in range(8):
        total += run.learning_rate_at(step) ** 2
        expected = run.learning_rate_at(step) ** 2 / total if total else 0.0
        assert math.isclose(newest_share(run, step), expected, rel_tol=1e-12)


@pytest.mark.parametrize("name", [*RULES, "eva"])
def test_memory_is_what_was_estimated(name: str) -> None:
    run = make_run(**({"optimizer": name} | RULES.get(name, EVA)))
    optimizer = Optimizer(parameters(), run)
    slots = [tensor for named in optimizer.slots.values() for tensor in named.values()]
    assert memory_bytes(run, parameters()) == sum(tensor.nbytes for tensor in slots)
    assert optimizer.working_bytes > 0 or name == "eva", "it works in place"


@pytest.mark.parametrize("name", RULES)
def test_stages_and_heirs_compute_what_one_process_does(checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    run = make_run(optimizer=name, learning_rate=3e-3, **RULES[name])
    (whole,) = chain = learners(checkpoint("gpt2"), run, (0, 5))
    alone = train(chain, STEPS)
    stages = learners(checkpoint("gpt2"), run, (0, 2, 5))
    losses = train(stages, 2)
    for index in range(MICROBATCHES):  # a step that is not committed leaves no trace
        pass_through(stages, index)
    heirs = learners(checkpoint("gpt2"), run, (0, 2, 5))
    for stage, heir in zip(stages, heirs, strict=True):
        for block in stage.blocks:
            heir.load(block, stage.state(block))
        heir.step = stage.step
    losses += train(heirs, STEPS - 2)
    assert losses == pytest.approx(alone, rel=1e-5)
    assert losses[-1] != losses[0]
    assert whole.step == heirs[0].step


def eva_by_hand(net: nn.Sequential, run: Run, batches: list[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Losses of a perceptron or a convolution, by the paper's formula in float64, with patches written out."""
    layers = [layer for layer in net if list(layer.parameters())]
    means: list[tuple[Tensor, Tensor]] = []
    momenta: list[Tensor] = []
    losses = []
    for step in range(steps):
        seen: list[Tensor] = []
        outputs: list[Tensor] = []
        x, labels = (torch.cat([batch[place] for batch in batches]) for place in (0, 1))
        x = x.double()
        for layer in net:
            if isinstance(layer, nn.Linear):
                seen.append(x.detach().reshape(-1, x.shape[-1]).mean(0))
            elif isinstance(layer, nn.Conv2d):
                patches = nn.functional.unfold(
                    x.detach(), layer.kernel_size, layer.dilation, layer.padding, layer.stride
                )  # type: ignore[arg-type]
                seen.append(patches.mean((0, 2)))
            x = layer(x)
            if layer in layers:
                outputs.append(x)
        loss = nn.functional.cross_entropy(x, labels)
        losses.append(float(loss.detach()))
        wanted = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
        found = torch.autograd.grad(loss, [*wanted, *outputs])
        gradients, flowing = found[: len(wanted)], found[len(wanted) :]
        rate, updates, total = run.learning_rate_at(step), [], 0.0
        for place, (a, g) in enumerate(zip(seen, flowing, strict=True)):
            g = g.sum((0, 2, 3)) if g.dim() == 4 else g.sum(0)
            a = torch.cat([a, torch.ones(1, dtype=a.dtype)])
            if step:
                old_a, old_g = means[place]
                a, g = 0.05 * old_a + 0.95 * a, 0.05 * old_g + 0.95 * g
                means[place] = (a, g)
            else:
                means.append((a, g))
            weight, bias = gradients[2 * place : 2 * place + 2]
            full = torch.cat([weight.flatten(1), bias[:, None]], 1)
            along = (g @ full @ a) / (run.epsilon + g.dot(g) * a.dot(a))
            updates.append((full - along * torch.outer(g, a)) / run.epsilon)
            total += float((updates[-1] * full).sum()) * rate**2
        factor = min(1.0, math.sqrt(run.clip / total))
        for place, (layer, update) in enumerate(zip(layers, updates, strict=True)):
            decayed = update * factor
            decayed[:, :-1] += run.weight_decay * layer.weight.detach().flatten(1)
            momenta += [decayed] if not step else []
            momenta[place] = decayed if not step else run.momentum * momenta[place] + decayed
            layer.weight.data -= rate * momenta[place][:, :-1].view_as(layer.weight)
            layer.bias.data -= rate * momenta[place][:, -1]
    return losses


class Convolutional(ToySegment):
    """A convolution, a linear layer and a head."""

    def __init__(self, start: int = 0, end: int = 3) -> None:
        super().__init__(start, end)
        torch.manual_seed(3)
        convolution = nn.Conv2d(1, 3, 2, stride=(1, 2), padding=1)
        units = [
            nn.Sequential(nn.Unflatten(1, (1, 2, FEATURES // 2)), convolution, nn.Tanh(), nn.Flatten()),
            nn.Sequential(nn.Linear(18, 5), nn.Tanh()),
            nn.Linear(5, CLASSES),
        ]
        self.modules = units  # type: ignore[assignment]

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {}


def eva_pass(chain: list[Learner], index: int) -> float:
    """One microbatch there and back; its loss."""
    values, labels = toy_values(index)
    for learner in chain:
        values = learner.forward(index, index, learner.segment.start, learner.segment.end, values, labels)
    grads: tuple[Tensor | None, ...] = ()
    for learner in reversed(chain):
        grads = learner.backward(index, grads)
    return float(values[0])


def eva_losses(chain: list[Learner], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(sum(eva_pass(chain, index) for index in range(MICROBATCHES)) / MICROBATCHES)
        commit_all(chain)
    return losses


def eva_chain(run: Run, *cuts: int, recompute: bool = False) -> list[Learner]:
    return [Learner(Convolutional(*span), run, recompute=recompute) for span in itertools.pairwise(cuts)]


def test_eva_is_the_papers() -> None:
    run = make_run(**EVA)
    net = nn.Sequential()
    for unit in Convolutional().modules:
        net.extend(unit if isinstance(unit, nn.Sequential) else [unit])
    batches = [(*toy_values(index).inputs, *toy_values(index).labels) for index in range(MICROBATCHES)]
    expected = eva_by_hand(net.double(), run, batches, STEPS)  # type: ignore[arg-type]
    losses = eva_losses(eva_chain(run, 0, 3), STEPS)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "geometry", [{}, {"stride": (2, 1), "padding": (0, 2)}, {"stride": 3, "padding": 1, "dilation": (1, 2)}]
)
def test_evas_mean_input_of_a_convolution_is_that_of_its_patches(geometry: dict[str, Any]) -> None:
    image_NCHW, weight = torch.rand(3, 2, 9, 8, generator=torch.Generator().manual_seed(0)), torch.ones(4, 2, 3, 2)
    changes: dict[str, Tensor] = {}
    with LayerWatch({id(weight): (changes, "weight")}):
        nn.functional.conv2d(image_NCHW, weight, **geometry)
        expected = nn.functional.unfold(image_NCHW, (3, 2), **geometry).mean((0, 2))
        assert changes["weight/input"].allclose(expected, atol=1e-6)
        changes.clear()
        nn.functional.conv2d(image_NCHW[0], weight, **geometry)
    assert not changes, "an image without a batch is not counted as rows of one"


def test_eva_counts_each_microbatch_once_over_stages_recomputations_and_heirs() -> None:
    run = make_run(**EVA)
    expected = eva_losses(eva_chain(run, 0, 3), STEPS)
    stages = eva_chain(run, 0, 1, 3, recompute=True)
    losses = eva_losses(stages, 2)
    heirs, (_, lost) = eva_chain(run, 0, 1, 3), eva_chain(run, 0, 1, 3)
    for stage, heir in [*zip(stages, heirs, strict=True), (stages[1], lost)]:
        for block in stage.blocks:
            heir.load(block, stage.state(block))
        heir.step = stage.step
    eva_pass([heirs[0], lost], 1)  # counted by the first stage, and lost with the second
    assert heirs[0].has_counted(1, 0, 1) and not heirs[1].has_counted(1, 1, 3)
    losses.append(sum(eva_pass(heirs, index) for index in range(MICROBATCHES)) / MICROBATCHES)
    commit_all(heirs)
    losses += eva_losses(heirs, STEPS - 3)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_eva_replicas_sum_their_means_with_the_gradients() -> None:
    run = make_run(**EVA)
    expected = eva_losses(eva_chain(run, 0, 3), STEPS)
    replicas = [eva_chain(run, 0, 3) for _ in range(2)]
    losses = []
    for _ in range(STEPS):
        losses.append(sum(eva_pass(replicas[index % 2], index) for index in range(MICROBATCHES)) / MICROBATCHES)
        blocks = replicas[0][0].blocks
        sums = sum(one.gradient(blocks).copy() for (one,) in replicas)
        assert isinstance(sums, Tensor)
        norm = replicas[0][0].squared_norm(blocks, sums) ** 0.5
        for (one,) in replicas:
            one.commit({tuple(blocks): sums.clone()}, norm)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_eva_clips_by_the_updates_that_it_makes_beside_frozen_biases() -> None:
    recipe = Recipe("constant", groups=(ParameterGroup("*bias", frozen=True),))
    settings = EVA | {"clip": 1e-6, "weight_decay": 0.0, "warmup_steps": 0}
    run = make_run(**settings, schedule=RECIPE, recipe=recipe)
    (learner,) = eva_chain(run, 0, 3)
    for index in range(MICROBATCHES):
        eva_pass([learner], index)
    blocks = learner.segment.parameters().values()
    weights = [one for named in blocks for name, one in named.items() if name.endswith("weight")]
    before = [one.detach().clone() for one in weights]
    flown = [one.grad.clone() for one in weights if one.grad is not None]
    norm = math.sqrt(learner.squared_norm(learner.blocks))
    commit_all([learner])
    moved = sum(
        float(((old - one.detach()) * gradient).sum())
        for old, one, gradient in zip(before, weights, flown, strict=True)
    )
    assert moved == pytest.approx(math.sqrt(run.clip) * norm, rel=1e-4)
