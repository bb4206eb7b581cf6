"""Bottleneck between units: one function in any split, projections that stay orthonormal, and a start from trained weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.fresh import tiny_config
from swarmnode.compute.model.stack import (
    Bottleneck,
    bottleneck_of,
    boundaries,
    digits_of,
    expected_states,
    principal_directions,
)
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.update_rules import retract
from swarmnode.errors import CheckpointError, ProtocolError, UsageError
from swarmnode.founding.model_source import ModelSource, from_config, with_bottleneck
from swarmnode.swarm.records.run import Averaging, Recipe, is_projection
from tests.compute.training.conftest import (
    LENGTH,
    SAMPLES,
    build,
    ids_of,
    learners,
    make_run,
    norm_of,
    pass_through,
    train,
)

RANK = 8
WHOLE, EACH = (0, 3), (0, 1, 2, 3)
Found = Callable[..., Checkpoint]


def found(folder: Path, kind: str, rank: int = RANK, vocabulary: int = 256, **settings: Any) -> ModelSource:
    config = build(kind).config
    config.vocab_size = vocabulary
    config.save_pretrained(folder / "config")
    return from_config(folder / "config", folder / "weights", bottleneck=rank, **{"stage_layers": 1, **settings})


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """kind, settings -> a checkpoint of three units with a bottleneck between them, and anchors."""
    folder = tmp_path_factory.mktemp("thin")

    def get(kind: str, **settings: Any) -> Checkpoint:
        place = folder / f"{kind} {settings}"
        if not place.exists():
            found(place, kind, **settings)
        return Checkpoint(place / "weights")

    return get


def projections(chain: Sequence[Learner]) -> dict[str, Tensor]:
    blocks = [learner.block(number) for learner in chain for number in learner.blocks]
    return {name: one.detach() for block in blocks for name, one in block.parameters.items() if is_projection(name)}


def distance(matrix: Tensor) -> float:
    """How far a projection is from orthonormal rows or columns."""
    rows = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    return float((rows @ rows.T - torch.eye(len(rows))).abs().max())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings", "anchor"),
    [
        ("llama", {}, 32),  # the hidden size, without a map
        ("gpt2-dropout", {"anchor": RANK}, RANK),  # tied, and with dropout
        ("llama", {"anchor": RANK}, RANK),
        ("llama", {"vocabulary": 300}, 32),  # ids of two digits
        ("llama", {"anchor": 0}, 0),
    ],
    ids=str,
)
def test_losses_are_the_same_in_any_split(
    thin: Found, kind: str, settings: dict[str, Any], anchor: int, recompute: bool
) -> None:
    checkpoint, run = thin(kind, **settings), make_run()
    assert (checkpoint.family.bottleneck or Bottleneck(0, 0)).anchor == anchor
    expected = train(learners(checkpoint, run, WHOLE), 4)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    for cuts in (EACH, (0, 2, 3)):
        assert train(learners(checkpoint, run, cuts, recompute=recompute), 4) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model_type", ["gemma2", "bloom", "mixtral"])  # scaled embeddings, no rotary ones, experts
def test_other_families(tmp_path: Path, model_type: str) -> None:
    config = tiny_config(AutoConfig.for_model(model_type))
    config.vocab_size, config.bos_token_id, config.eos_token_id = 256, 1, 2
    config.save_pretrained(tmp_path / "config")
    source = from_config(tmp_path / "config", tmp_path / "weights", bottleneck=RANK, stage_layers=1)
    checkpoint, each = Checkpoint(tmp_path / "weights"), range(source.model.units + 1)
    run = make_run()
    expected = train(learners(checkpoint, run, (0, each[-1])), 2)
    assert train(learners(checkpoint, run, each), 2) == pytest.approx(expected, rel=1e-5)


def test_only_the_rank_crosses_and_each_projection_has_one_owner(thin: Found) -> None:
    chain = learners(thin("llama", anchor=0), make_run(), EACH)
    values = chain[0].forward(0, 0, 0, 1, (ids_of(0, 0),))
    assert [value.shape for value in values] == [(SAMPLES, LENGTH, RANK)]
    named = [name for learner in chain for name in projections([learner])]
    assert (
        sorted(named)
        == sorted(set(named))
        == sorted(f"model.layers.{name}.weight" for name in ("0.thin_out", "1.thin_in", "1.thin_out", "2.thin_in"))
    )
    hidden = torch.zeros(SAMPLES, LENGTH, 32)
    with pytest.raises(ProtocolError, match="wrong dtype or shape"):
        chain[1].forward(0, 0, 1, 2, (hidden,))


def test_tokens_cross_beside_the_rank_and_each_anchor_has_one_owner(thin: Found) -> None:
    checkpoint, ids_BT = thin("llama", vocabulary=300, anchor=RANK), ids_of(0, 0)
    chain = learners(checkpoint, make_run(), EACH)
    code, digits = chain[0].forward(0, 0, 0, 1, (ids_BT,))
    assert (code.shape, digits.dtype, digits.shape) == ((SAMPLES, LENGTH, RANK), torch.uint8, (SAMPLES, LENGTH, 2))
    assert torch.equal(chain[1].forward(0, 0, 1, 2, (code, digits))[1], digits)
    named = [name for learner in chain for block in learner.blocks for name in learner.block(block).parameters]
    assert sorted(name for name in named if "anchor" in name) == sorted(
        f"model.layers.{layer}.thin_anchor{what}.weight" for layer in (1, 2) for what in ("", "_map")
    )


def test_tokens_cross_beside_places_and_sums_of_routers(tmp_path: Path) -> None:
    config = tiny_config(AutoConfig.for_model("mixtral"))
    config.vocab_size, config.bos_token_id, config.eos_token_id = 256, 1, 2
    config.save_pretrained(tmp_path / "config")
    from_config(tmp_path / "config", tmp_path / "weights", bottleneck=RANK, stage_layers=1)
    checkpoint = Checkpoint(tmp_path / "weights")
    run = make_run(schedule="recipe", recipe=Recipe(router_balance=0.1, router_z_loss=0.1))
    places_BT = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4], [*range(7), *range(5)]])
    losses = []
    for cuts in ((0, checkpoint.family.units), range(checkpoint.family.units + 1)):
        values: tuple[Tensor, ...] = (ids_of(0, 0), places_BT)
        for learner in learners(checkpoint, run, cuts):
            assert len(values) in (2, 4)
            segment = learner.segment
            values = learner.forward(0, 0, segment.start, segment.end, values, (ids_of(0, 0),))
        losses.append(float(values[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda digits: (), "too many or too few"),
        (lambda digits: (digits, digits, digits), "too many or too few"),
        (lambda digits: (digits.long(),), "dtype or shape"),
        (lambda digits: (digits[..., :1],), "dtype or shape"),
        (lambda digits: (digits[:, 1:],), "dtype or shape"),
        (lambda digits: (digits_of(torch.full_like(digits[..., 0], 300, dtype=torch.int64), 2),), "another tokenizer"),
    ],
)
def test_wrong_tokens_of_a_neighbour_are_refused(
    thin: Found, change: Callable[[Tensor], tuple[Tensor, ...]], word: str
) -> None:
    chain = learners(thin("llama", vocabulary=300), make_run(), EACH)
    code, digits = chain[0].forward(0, 0, 0, 1, (ids_of(0, 0),))
    with pytest.raises(ProtocolError, match=word):
        chain[1].forward(0, 0, 1, 2, (code, *change(digits)))
    assert chain[1].forward(0, 0, 1, 2, (code, digits))


def test_anchors_begin_without_effect_and_learn(thin: Found) -> None:
    chains = [learners(thin("llama", anchor=anchor), make_run(), WHOLE) for anchor in (32, 0)]
    losses = [train(chain, 2) for chain in chains]
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]
    learnt = [one for name, one in chains[0][0].block(1).parameters.items() if "thin_anchor." in name]
    assert [float(one.detach().abs().max()) > 0 for one in learnt] == [True]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 50.0},
        {"optimizer": "muon", "momentum": 0.95},
        {"optimizer": "lion"},
        {"optimizer": "schedule-free", "schedule": "constant"},
        {"learning_rate": 0.3},
    ],
    ids=str,
)
def test_projections_stay_orthonormal_and_learn(thin: Found, settings: dict[str, Any]) -> None:
    chain = learners(thin("llama"), make_run(steps=3, **settings), WHOLE)
    before = {name: one.clone() for name, one in projections(chain).items()}
    train(chain, 2)
    for name, one in projections(chain).items():
        assert distance(one) < 1e-5, name
        assert not torch.equal(one, before[name]), name


def test_projections_are_never_decayed() -> None:
    run = make_run(weight_decay=0.1)
    assert run.treat("model.layers.0.thin_out.weight", 2).weight_decay == 0
    assert run.treat("model.layers.1.thin_anchor.weight", 2).weight_decay == 0
    assert run.treat("model.layers.1.thin_anchor_map.weight", 2).weight_decay == 0
    assert run.treat("model.layers.0.mlp.up_proj.weight", 2).weight_decay == 0.1


def test_replicas_that_average_seldom_agree_on_orthonormal_projections(thin: Found) -> None:
    run = make_run(averaging=Averaging(every=2, outer_lr=0.7))
    chain = learners(thin("llama"), run, WHOLE)
    learner = chain[0]
    for _ in range(2):
        for index in range(3):
            pass_through(chain, index)
        learner.commit({}, norm_of(chain), summed=(), apart=learner.blocks)
    blocks = tuple(learner.blocks)
    learner.commit({}, 1.0, summed=(), pseudo_gradients={blocks: learner.pseudo_gradients(blocks)})
    assert max(map(distance, projections(chain).values())) < 1e-5
    assert float(learner.pseudo_gradients(blocks).abs().max()) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 7)])
def test_retraction_keeps_the_singular_vectors(shape: tuple[int, int], scale: float) -> None:
    torch.manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = scale * (u @ torch.diag(torch.linspace(0.4, 1.6, min(shape))) @ v)
    retract(matrix)
    assert torch.allclose(matrix, u @ v, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_serving_computes_what_training_does(tmp_path: Path, kind: str) -> None:
    found(tmp_path, kind, vocabulary=300)
    checkpoint, ids_BT = with_random_anchors(tmp_path / "weights"), ids_of(0, 0)
    span = load_segment(checkpoint, 0, 3).span
    expected_BTV = span.forward(ids_BT, cache=None).detach()
    for cuts in (WHOLE, EACH):
        runners = [
            StageRunner(load_span(checkpoint, *one), RunnerConfig(cache_bytes=1 << 24)) for one in pairwise(cuts)
        ]
        for runner in runners:
            runner.open(0, rows=SAMPLES, max_length=LENGTH)
        outputs = []
        for begin, end in [(0, 5), *pairwise(range(5, LENGTH + 1))]:
            x = ids_BT[:, begin:end]
            for runner in runners:
                x = runner.run([StepInput(0, x, want=2)])[0].output
            outputs.append(x)
        assert torch.allclose(torch.cat(outputs, 1), expected_BTV, atol=1e-5)


def with_random_anchors(folder: Path) -> Checkpoint:
    """A checkpoint whose anchors are as if they were trained."""
    path = folder / "model.safetensors"
    tensors, chance = load_file(path), torch.Generator().manual_seed(0)
    anchors = {name: one for name, one in tensors.items() if "thin_anchor." in name}
    drawn = {name: torch.randn(one.shape, generator=chance) for name, one in anchors.items()}
    assert drawn
    save_file({**tensors, **drawn}, path, metadata={"format": "pt"})
    return Checkpoint(folder)


@pytest.mark.parametrize("wrong", [0.5, -1.0, 300.0, 1e9, float("nan"), float("inf")])
def test_served_states_that_name_no_token_are_refused(thin: Found, wrong: float) -> None:
    checkpoint = thin("llama", vocabulary=300)
    runner = StageRunner(load_span(checkpoint, 1, 3), RunnerConfig(cache_bytes=1 << 24))
    runner.open(0, rows=1, max_length=LENGTH)
    x = torch.zeros(1, 2, RANK + 2)
    bad = x.clone()
    bad[0, 1, -2:] = torch.tensor([wrong // 256, wrong % 256]) / 256
    with pytest.raises(ProtocolError, match=r"name tokens in \[0, 300\)"):
        runner.run([StepInput(0, bad)])
    assert torch.isfinite(runner.span.forward(bad, cache=None)).all()  # as rows that only stand in
    assert torch.isfinite(runner.run([StepInput(0, x)])[0].output).all()


def test_units_are_groups_of_layers_with_the_ends_inside(tmp_path: Path) -> None:
    found(tmp_path, "llama", stage_layers=2)
    checkpoint = Checkpoint(tmp_path / "weights")
    family = checkpoint.family
    assert (family.units, family.width) == (2, RANK + 1)
    assert [family.layers_of(*span) for span in ((0, 1), (1, 2), (0, 2))] == [range(2), range(2, 3), range(3)]
    owners = {name: family.units_of_tensor(name) for name in checkpoint.entries}
    assert owners["model.embed_tokens.weight"] == owners["model.layers.1.thin_out.weight"] == (0,)
    assert owners["lm_head.weight"] == owners["model.layers.2.thin_in.weight"] == (1,)
    each = [family.cache_bytes_per_token(unit, 4) for unit in range(2)]
    assert each[0] == 2 * each[1] > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_bottleneck_as_wide_as_the_model_keeps_trained_weights(tmp_path: Path, kind: str) -> None:
    build(kind).save_pretrained(tmp_path / "trained")
    text = [number * 7 % 99 for number in range(600)]
    source = with_bottleneck(
        str(tmp_path / "trained"), tmp_path / "wide", 32, lambda _: text, stage_layers=1, byte_level=True
    )
    assert source.bottleneck == 32
    loss = pass_through(learners(Checkpoint(tmp_path / "wide"), make_run(), EACH), 0)
    original = pass_through(learners(Checkpoint(tmp_path / "trained"), make_run(), (0, 5)), 0)
    assert loss == pytest.approx(original, rel=1e-5)


@pytest.mark.parametrize(("anchor", "most"), [(32, 0.2), (16, 0.5), (0, 1.0)])
def test_anchors_begin_with_what_a_token_tells_of_its_state(tmp_path: Path, anchor: int, most: float) -> None:
    """States behind the first layer of a random model are mostly made of the token: little of them is lost with anchors."""
    build("llama").save_pretrained(tmp_path / "trained")
    ids_BT = torch.tensor([[number * 7 % 99 for number in range(512)]]).view(4, 128)
    source = with_bottleneck(
        str(tmp_path / "trained"), tmp_path / "thin", 2, lambda _: ids_BT.flatten().tolist(),
        stage_layers=1, byte_level=True, anchor=anchor,
    )  # fmt: skip
    assert source.anchor == anchor
    with torch.no_grad():
        states_BTH = load_segment(Checkpoint(tmp_path / "trained"), 0, 2).span.forward(ids_BT, cache=None)
    weights = {
        name.removeprefix("model.layers."): weight
        for file in (tmp_path / "thin").glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
    widened_BTH = states_BTH @ weights["0.thin_out.weight"].T @ weights["1.thin_in.weight"].T
    if anchor:
        anchors_BTA = weights["1.thin_anchor.weight"][ids_BT]
        mapped = "1.thin_anchor_map.weight" in weights
        widened_BTH += anchors_BTA @ weights["1.thin_anchor_map.weight"].T if mapped else anchors_BTA
    lost = float((widened_BTH - states_BTH).square().sum() / states_BTH.square().sum())
    assert most / 3 < lost < most


def test_principal_directions_keep_most_of_the_energy() -> None:
    torch.manual_seed(0)
    basis_RH = torch.linalg.qr(torch.randn(9, 3))[0].T
    states_BTH = torch.randn(4, 5, 3) @ torch.diag(torch.tensor([3.0, 1.0, 0.1])) @ basis_RH
    rows_RH = principal_directions(states_BTH, 3)
    assert torch.allclose(states_BTH @ rows_RH.T @ rows_RH, states_BTH, atol=1e-5)
    assert torch.allclose(rows_RH @ rows_RH.T, torch.eye(3), atol=1e-5)
    assert float((principal_directions(states_BTH, 1) @ basis_RH[0]).abs()) == pytest.approx(1, abs=0.05)


def test_states_are_expected_of_tokens_that_a_sample_lacks() -> None:
    torch.manual_seed(0)
    embedding_VE, map_EH = torch.randn(50, 6), torch.randn(6, 4)
    ids_BT = torch.arange(40).view(4, 10)
    states_BTH = (embedding_VE @ map_EH + 3.0)[ids_BT] + 0.01 * torch.randn(4, 10, 4)
    expected_VH = expected_states(states_BTH, ids_BT, embedding_VE)
    assert torch.allclose(expected_VH, embedding_VE @ map_EH + 3.0, atol=0.2)
    few_VH = expected_states(states_BTH[:1, :2], ids_BT[:1, :2], embedding_VE)  # fewer tokens than numbers
    assert torch.isfinite(few_VH).all()


@pytest.mark.parametrize(
    ("rank", "layers", "word"),
    [(0, 1, "choose 1 to 32"), (-3, 1, "1 to 32"), (33, 1, "1 to 32"), (8, 0, "1 to 2"), (8, 3, "1 to 2")],
)
def test_impossible_bottlenecks_are_refused(tmp_path: Path, rank: int, layers: int, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        found(tmp_path, "llama", rank, stage_layers=layers)
    for anchor in (-1, 33):
        with pytest.raises(UsageError, match="choose 0 to 32"):
            found(tmp_path, "llama", anchor=anchor)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    "named",
    [
        "8",
        8,
        {"rank": 8},
        {"rank": True, "layers": 1},
        {"rank": 1 << 40, "layers": 1},
        {"rank": 1, "layers": 1, "anchor": -1},
        {"rank": 1, "layers": 1, "anchor": 33},
        {"rank": 1, "layers": 1, "anchor": True},
        {"rank": 1, "layers": 1, "anchor": "8"},
    ],
)
def test_a_false_bottleneck_in_a_config_is_refused(named: Any) -> None:
    config = build("llama").config
    config.swarmnode_bottleneck = named
    with pytest.raises(CheckpointError, match=r"config\.json"):
        bottleneck_of(config)


def test_a_second_bottleneck_and_too_short_a_sample_are_refused(thin: Found, tmp_path: Path) -> None:
    folder = str(thin("llama").path)
    with pytest.raises(UsageError, match="has one already"):
        with_bottleneck(folder, tmp_path / "again", RANK, lambda _: [1] * 999)
    build("llama").save_pretrained(tmp_path / "trained")
    with pytest.raises(UsageError, match="too short"):
        with_bottleneck(str(tmp_path / "trained"), tmp_path / "out", RANK, lambda _: [1] * 9, stage_layers=1)


def test_a_config_with_a_bottleneck_and_a_model_of_one_layer_are_refused(thin: Found, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of a model with a bottleneck: take swarmnode_bottleneck out of it"):
        from_config(thin("llama").path, tmp_path / "again")
    config = build("llama").config
    config.num_hidden_layers = 1
    assert Bottleneck(RANK, 1).fault(config) == "the model has one layer, so that nothing lies between two stages"
    config.num_hidden_layers = 4
    assert Bottleneck(RANK, 9).fault(config) == "stages of 9 layers: the model has 4; choose 1 to 3"


def test_boundaries_lie_behind_whole_stages() -> None:
    config = build("llama").config
    config.num_hidden_layers, config.swarmnode_bottleneck = 9, {"rank": 8, "layers": 2}
    bottleneck = bottleneck_of(config)
    assert bottleneck is not None and bottleneck.described() == {"rank": 8, "layers": 2}
    assert bottleneck._replace(anchor=4).described() == {"rank": 8, "layers": 2, "anchor": 4}
    assert boundaries(bottleneck, 9) == [1, 3, 5, 7]
