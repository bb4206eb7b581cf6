"""Families with recurrent states: spans with states in cohort caches give what transformers' own model gives, family by family."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.codec.tensors import payload_bytes
from swarmnode.compute.gguf.repack import FolderPack
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import check_trains_at_layers, family_of
from swarmnode.compute.model.traced_model import CONV, PassStates
from swarmnode.compute.packing.ggml import library
from swarmnode.compute.packing.packed_weight import held_by
from swarmnode.compute.packing.recipes import RECIPES
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import CheckpointError, ProtocolError
from swarmnode.serving.session.opening import kinds_of, pack_copy, unpack_copy
from tests.numerics.families import COMMON, RECURRENT, tiny_config

TOLERANCE = 1e-4  # of the logits' standard deviation; float32, whose sums depend on the order
LENGTH = 16
CUTS = {"one": (0, 6), "two": (0, 2, 6), "three": (0, 2, 4, 6)}
needs_ggml = pytest.mark.skipif(
    library() is None, reason="the package xllamacpp is not installed, or not for this machine"
)
pytestmark = pytest.mark.filterwarnings("ignore")


class Stages:
    """The spans of a checkpoint, run one after another."""

    def __init__(self, checkpoint: Checkpoint, cuts: tuple[int, ...], **options: Any) -> None:
        spans = [load_span(checkpoint, start, end, **options) for start, end in pairwise(cuts)]
        self.runners = [StageRunner(span, RunnerConfig(1 << 26)) for span in spans]

    def open(self, *names: Any, rows: int = 1, padding: tuple[int, ...] = ()) -> None:
        for runner in self.runners:
            for name in names:
                runner.open(name, rows=rows, max_length=64, padding=padding)

    def run(self, inputs: dict[Any, Tensor], **options: Any) -> list[Tensor]:
        values = list(inputs.values())
        for runner in self.runners:
            works = [StepInput(name, x, WANT_ALL, **options) for name, x in zip(inputs, values, strict=True)]
            values = [result.output for result in runner.run(works)]
        return values


@pytest.fixture(scope="module", params=RECURRENT)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    """(whole model, its checkpoint): random in every tensor."""
    if request.param not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(request.param), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, Checkpoint(Path(path))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.std()) < TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@torch.inference_mode()
def test_spans_with_states_equal_the_whole(family: tuple[Any, Checkpoint]) -> None:
    """Chunked prompts and single steps in one, two and three stages; sessions of other lengths in the same passes; padding."""
    model, checkpoint = family
    ids = torch.randint(2, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model(ids[:1], use_cache=False).logits
    for cuts in CUTS.values():
        stages = Stages(checkpoint, cuts)
        stages.open("all")
        ends = (0, 6, 9, 13, 14, 15, LENGTH)
        found = [stages.run({"all": ids[:1, start:end]})[0] for start, end in pairwise(ends)]
        assert_same(torch.cat(found, 1), expected)
    at = {3: 3, 11: 11, 7: 7}
    stages.open(*at)
    for name in at:
        stages.run({name: ids[:1, :name]})
    for turn in range(4):
        present = [name for name in at if not (turn == 1 and name == 7)]
        found = stages.run({name: ids[:1, at[name] : at[name] + 1] for name in present})
        for name, logits in zip(present, found, strict=True):
            assert_same(logits, expected[:, at[name] : at[name] + 1])
            at[name] += 1
    assert len({id(stages.runners[0].pool.sessions[name].cohort) for name in at}) == 1
    stages.open("first", "second", "third")
    stages.run({"third": ids[1:, :2]})
    together = stages.run({"first": ids[:1, :10], "second": ids[1:, :10]})
    second = model(ids[1:], use_cache=False).logits
    for logits, whole in zip(together, (expected, second), strict=True):
        assert_same(logits, whole[:, :10])
    again = stages.run({"first": ids[:1, 10:], "second": ids[1:, 10:], "third": ids[1:, 2:8]})
    for logits, whole in zip(again, (expected[:, 10:], second[:, 10:], second[:, 2:8]), strict=True):
        assert_same(logits, whole)
    pool = stages.runners[0].pool
    assert pool.sessions["first"].cohort is pool.sessions["second"].cohort or stages.runners[0].span.steps_singly
    padding = (0, 4)
    stages.open("padded", rows=2, padding=padding)
    mask = (torch.arange(LENGTH) >= torch.tensor(padding)[:, None]).long()
    found = [stages.run({"padded": (ids * mask)[:, start:end]})[0] for start, end in pairwise((0, 8, 9, 10))]
    logits = torch.cat(found, 1)
    assert_same(logits[:1], expected[:, :10])
    assert_same(logits[1:, 4:], model(ids[1:, 4:10], use_cache=False).logits)


@torch.inference_mode()
def test_sessions_hold_no_more_than_was_promised(family: tuple[Any, Checkpoint]) -> None:
    """Keys, values, states, snapshots and inputs of sessions with all snapshots that they may have, by their storages."""
    _, checkpoint = family
    ids = torch.randint(2, 97, (1, 320), generator=torch.Generator().manual_seed(1))
    runner = StageRunner(load_span(checkpoint, 0, 6), RunnerConfig(1 << 28, prefill_positions=100))
    for name in range(3):
        runner.open(name, rows=1, max_length=320)
        runner.run([StepInput(name, ids[:, : 312 - name], WANT_ALL)])
        for at in range(312 - name, 320, 2):
            runner.run([StepInput(name, ids[:, at : at + 1], WANT_ALL, guessed=1)])
    sessions = list(runner.pool.sessions.values())
    held = [x for one in sessions if one.history for each in one.history.snapshots for x in each.states.values()]
    held += [x for one in sessions if one.history for x in one.history._inputs]
    for cohort in runner.pool.cohorts:
        held += [*cohort.states.committed.values(), *(x for buffers in cohort.buffers.values() for x in buffers)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    assert 0 < sum(storages.values()) <= runner.pool.reserved_bytes


@pytest.mark.parametrize("kv", ["plain", "int8"])
@torch.inference_mode()
def test_a_copy_of_a_session_goes_on_elsewhere(family: tuple[Any, Checkpoint], kv: str) -> None:
    """As bytes, in a second pool of the same layers: the same text. A copy that is not all that the layers keep is refused with
    the name of a layer."""
    model, checkpoint = family
    ids = torch.randint(2, 97, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    spans = [load_span(checkpoint, 0, 3), load_span(checkpoint, 3, 6)]
    first, *runners = [StageRunner(span, RunnerConfig(1 << 26, kv=kv)) for span in (spans[0], spans[1], spans[1])]
    for runner in (first, *runners):
        runner.open("text", rows=1, max_length=64)
    layers = spans[1].layers_of(3, 6)
    for start, end in ((0, 9), (9, 10), (10, 13)):
        hidden = first.run([StepInput("text", ids[:, start:end], WANT_ALL)])[0].output
        runners[0].run([StepInput("text", hidden, WANT_ALL)])
        if end == 10:
            runners[0].pool.copy_out("text", 64, range(0))  # a snapshot
    pools = [runner.pool for runner in runners]
    copy = pools[0].copy_out("text", 12, layers)
    assert copy is not None and 10 <= copy.length <= 12  # single steps of some families have snapshots of their own
    reply, payload = pack_copy(copy)
    assert sum(map(len, payload)) <= pools[0].copy_bytes(layers, copy.length)
    whole = b"".join(payload)
    pools[1].check_copy(layers, copy.length, kinds_of(reply))
    pools[1].copy_in("text", unpack_copy(reply, whole))
    again = StageRunner(spans[0], RunnerConfig(1 << 26, kv=kv))
    again.open("text", rows=1, max_length=64)
    rest = again.run([StepInput("text", ids, WANT_ALL)])[0].output[:, copy.length :]
    found = torch.cat(
        [runners[1].run([StepInput("text", rest[:, at : at + 1], WANT_ALL)])[0].output for at in range(3)], 1
    )
    expected = model(ids, use_cache=False).logits[:, copy.length : copy.length + 3]
    if kv == "plain":
        assert_same(found, expected)
    with pytest.raises(ProtocolError, match=r"can(not)? be cut down"):
        runners[1].truncate("text", copy.length - 1)

    kinds = kinds_of(reply)
    for key, (shape, dtype) in kinds.items():
        wrong = [
            (shape, torch.float16),
            ((2, *shape[1:]), dtype),
            ((*shape[:-1], shape[-1] + 1), dtype),
            (shape[1:], dtype),
            ((), dtype),
        ]
        variants = [{**kinds, key: one} for one in wrong] + [{one: kinds[one] for one in kinds if one != key}]
        for strange in ((key[0], ("other", 0)), (key[0], (key[1][0], 9))):
            variants.append({**kinds, strange: kinds[key]})
        for variant in variants:
            with pytest.raises(ProtocolError, match=f"layer {key[0]}"):
                pools[1].check_copy(layers, copy.length, variant)
    if any(kind == "kv" for _, (kind, _) in kinds):
        with pytest.raises(ProtocolError, match="keys and values"):
            pools[1].check_copy(layers, copy.length + 30, kinds)
    with pytest.raises(ProtocolError):
        unpack_copy(reply, whole[:-1])
    part = next(one for one in reply.parts if one.tensor.dtype == 0)
    ahead = sum(payload_bytes(one.tensor) for one in reply.parts[: reply.parts.index(part)])
    with pytest.raises(ProtocolError, match=f"layer {part.layer}"):
        unpack_copy(reply, whole[:ahead] + b"\x00\x00\xc0\x7f" + whole[ahead + 4 :])


@torch.inference_mode()
def test_states_go_back_to_any_recent_position(family: tuple[Any, Checkpoint]) -> None:
    """Wrong guesses, a text cut to an earlier position, and a copy of the beginning go on as the whole model does."""
    model, checkpoint = family
    ids = torch.randint(2, 97, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    expected = model(ids[:1], use_cache=False).logits
    stages = Stages(checkpoint, CUTS["two"])
    stages.open("cut", "copy")
    stages.run({"cut": ids[:1, :9]})
    stages.run({"cut": torch.cat([ids[:1, 9:10], ids[1:, 10:13]], 1)}, guessed=3)
    (logits,) = stages.run({"cut": ids[:1, 10:12]}, truncate_to=10, guessed=1)
    assert_same(logits, expected[:, 10:12])
    (logits,) = stages.run({"cut": ids[:1, 11:12]}, truncate_to=11)
    stages.run({"cut": ids[1:, 12:]})
    for runner in stages.runners:
        assert runner.pool.reachable("cut", LENGTH, 10) == 10
        runner.fork("cut", "copy", 10)
    (logits,) = stages.run({"copy": ids[:1, 10:]})
    assert_same(logits, expected[:, 10:])
    for to in (12, 5, 0):
        (logits,) = stages.run({"cut": ids[:1, to:]}, truncate_to=to)
        assert_same(logits, expected[:, to:])


@pytest.mark.parametrize("family", ["falcon_h1"], indirect=True)
@torch.inference_mode()
def test_far_back_needs_a_snapshot_and_memory_is_bounded(family: tuple[Any, Checkpoint]) -> None:
    """Snapshots are few; what lies between two of them and is too far back has to come again from the snapshot before."""
    model, checkpoint = family
    ids = torch.randint(2, 97, (1, 230), generator=torch.Generator().manual_seed(3))
    (runner,) = Stages(checkpoint, CUTS["one"]).runners
    runner.open("long", rows=1, max_length=600)
    prompt = ids.repeat(1, 2)[:, :400]
    runner.run([StepInput("long", prompt[:, :300])])
    for at in range(300, 400):
        runner.run([StepInput("long", prompt[:, at : at + 1])])
    history = runner.pool.sessions["long"].history
    assert history is not None and len(history.lengths) <= 4 and 299 in history.lengths
    assert runner.pool.reachable("long", 400, 390) == 390, "its inputs are here"
    assert runner.pool.reachable("long", 400, 299) == 299, "other answers begin before the prompt's last position"
    assert runner.pool.reachable("long", 400, 200) == 0, "nothing is kept from there"
    with pytest.raises(ProtocolError, match="no recurrent state"):
        runner.pool.truncate("long", 200)
    expected = model(prompt[:, :310], use_cache=False).logits
    (result,) = runner.run([StepInput("long", prompt[:, 305:310], WANT_ALL, truncate_to=305)])
    assert_same(result.output, expected[:, 305:])
    assert runner.pool.reserved_bytes == runner.reservation_bytes(1, 600, 0, 6)
    assert runner.reservation_bytes(1, 600, 0, 6) > 6 * sum(checkpoint.family.state_bytes(unit, 4) for unit in range(6))


@pytest.mark.parametrize("family", ["falcon_h1"], indirect=True)
@torch.inference_mode()
def test_large_states_have_fewer_snapshots(family: tuple[Any, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a session takes less memory, and still goes back by guesses, and to where an answer began."""
    model, checkpoint = family
    taken = {}
    for limit in (1 << 28, 1):
        monkeypatch.setattr("swarmnode.compute.model.family.SNAPSHOT_BYTES", limit)
        small = Checkpoint(checkpoint.path)
        (runner,) = Stages(small, CUTS["one"]).runners
        taken[limit] = runner.reservation_bytes(1, 600, 0, 6), small.family.state_copies
    assert taken[1][0] < taken[1 << 28][0] and taken[1][1] == 4
    ids = torch.randint(2, 97, (1, 460), generator=torch.Generator().manual_seed(3)).clamp(max=96)
    runner.open("long", rows=1, max_length=600)
    runner.run([StepInput("long", ids[:, :300])])
    for at in range(300, 400, 4):
        runner.run([StepInput("long", ids[:, at : at + 4], guessed=3)])
        runner.run([StepInput("long", ids[:, at + 2 : at + 4], truncate_to=at + 2)])
    history = runner.pool.sessions["long"].history
    assert history is not None and len(history.lengths) == 2
    assert runner.pool.reachable("long", 400, 299) == 299
    expected = model(ids[:, :330], use_cache=False).logits
    (result,) = runner.run([StepInput("long", ids[:, 305:330], WANT_ALL, truncate_to=305)])
    assert_same(result.output, expected[:, 305:])


@pytest.mark.parametrize("family", ["mamba2"], indirect=True)
@torch.inference_mode()
def test_a_session_of_states_alone_takes_the_same_memory_at_any_length(family: tuple[Any, Checkpoint]) -> None:
    (runner,) = Stages(family[1], CUTS["one"]).runners
    assert runner.reservation_bytes(1, 10, 0, 6) == runner.reservation_bytes(1, 100_000, 0, 6) > 0
    assert runner.pool.positions_in(runner.reservation_bytes(1, 10, 0, 6)) > 100_000
    assert runner.pool.positions_in(runner.reservation_bytes(1, 10, 0, 6) - 1) == 0


@torch.inference_mode()
def test_a_failed_pass_leaves_the_states_as_they_were(
    family: tuple[Any, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = family
    ids = torch.randint(2, 97, (1, 8), generator=torch.Generator().manual_seed(4))
    stages = Stages(checkpoint, CUTS["one"])
    stages.open("one")
    stages.run({"one": ids[:, :6]})
    (runner,) = stages.runners
    with monkeypatch.context() as patch:
        patch.setattr(runner.span.stack._modules["3"], "forward", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            stages.run({"one": ids[:, 6:7]})
    found = torch.cat([stages.run({"one": ids[:, at : at + 1]})[0] for at in (6, 7)], 1)
    assert_same(found, model(ids, use_cache=False).logits[:, 6:])


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
PACKED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 16, "head_dim": 16},
    "granitemoehybrid": {"mamba_n_heads": 16, "moe_intermediate_size": 32, "shared_intermediate_size": 32},
    "qwen3_5_text": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "jamba": {"num_experts": 1, "mamba_dt_rank": 32},
    "mamba2": {"num_heads": 16},
    "lfm2_moe": {},
}


@needs_ggml
@pytest.mark.parametrize("name", PACKED)
@torch.inference_mode()
def test_packed_weights_multiply_in_layers_with_states(name: str, tmp_path: Path) -> None:
    """In a folder with packed matrices, prompts in chunks and single steps equal those of its plain numbers."""
    torch.manual_seed(0)
    sizes = {**COMMON, **RECURRENT[name], **WIDE, **PACKED[name]}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), dtype=torch.float32).save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    FolderPack(Checkpoint(tmp_path / "a"), RECIPES["q8_0"]).write(tmp_path / "b")
    checkpoint, ids = Checkpoint(tmp_path / "b"), torch.randint(2, 97, (1, LENGTH))
    found = []
    for products in ("plain", "exact", "fast"):
        stages = Stages(checkpoint, CUTS["two"], dtype=torch.float32, products=products)
        assert bool(list(held_by(stages.runners[0].span.model))) == (products != "plain")
        stages.open("all")
        found.append(torch.cat([stages.run({"all": ids[:, a:b]})[0] for a, b in pairwise((0, 8, 12, 13, LENGTH))], 1))
    assert_same(found[1], found[0])
    assert float((found[2] - found[0]).abs().max() / found[0].std()) < 0.3


def test_a_state_of_another_shape_is_refused_with_its_layer() -> None:
    states = PassStates()
    states.begin(is_first=True)
    states.set(3, (CONV, 0), torch.zeros(2, 8, 4))
    states.commit(2, [slice(0, 2)])
    states.begin(is_first=False)
    with pytest.raises(ValueError, match=r"layer 3: the conv state has shape \(2, 8, 4\), and not \(2, 8, 3\)"):
        states.set(3, (CONV, 0), torch.zeros(2, 8, 3))


def test_what_is_not_served_of_them_is_refused_in_a_sentence() -> None:
    hybrid = family_of(tiny_config("falcon_h1"))
    with pytest.raises(CheckpointError, match=r"tuning in layers do not follow"):
        check_trains_at_layers(hybrid)
    short = tiny_config("qwen3_next")
    short.layer_types = short.layer_types[:2]
    with pytest.raises(CheckpointError):
        family_of(short)


def test_the_page_lists_the_families_that_are_tested_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.partition("<!-- families with recurrent states -->")[2].partition("<!-- end -->")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(RECURRENT)


def fail(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError("in the middle of a pass")
