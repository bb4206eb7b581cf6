"""The runner against the whole model: continuous batching, chunks, cuts, reordering, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import load_span
from swarmnode.compute.serving.cache import OutOfCache
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput, is_finite
from swarmnode.errors import ErrorCode, ProtocolError

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(checkpoint_path):
    return Checkpoint(checkpoint_path)


@pytest.fixture(scope="module")
def span(checkpoint):
    return load_span(checkpoint, 0, checkpoint.units)


@pytest.fixture
def runner(span):
    return StageRunner(span, RunnerConfig(cache_bytes=1 << 24, prefill_positions=8))


def ids_of(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def expected(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=False).logits


def close(one, other) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() < TOLERANCE)


def test_prompt_in_chunks_equals_one_pass(model, runner):
    ids = ids_of(21)
    runner.open("a", rows=1, max_length=32)
    (result,) = runner.run([StepInput("a", ids, want=WANT_ALL)])
    assert close(result.output, expected(model, ids))
    assert (result.start, runner.length("a")) == (0, 21)
    (result,) = runner.run([StepInput("a", ids_of(3, seed=1))])
    assert result.start == 21
    assert close(result.output, expected(model, torch.cat([ids, ids_of(3, seed=1)], 1))[:, -1:])


def test_only_wanted_logits_are_made(runner):
    runner.open("a", rows=1, max_length=32)
    (result,) = runner.run([StepInput("a", ids_of(20), want=WANT_NOTHING)])
    assert result.output.shape == (1, 0, 99)
    (result,) = runner.run([StepInput("a", ids_of(1), want=WANT_NOTHING)])
    assert result.output.shape == (1, 0, 99)
    (result,) = runner.run([StepInput("a", ids_of(5))])
    assert result.output.shape == (1, 1, 99)


def test_sessions_come_and_go_in_any_mix(model, runner):
    """Decode steps of random subsets of sessions; every logit equals a pass of the whole model over that session alone."""
    generator = torch.Generator().manual_seed(3)
    texts = {name: ids_of(length, seed=length) for name, length in zip("abcdef", (1, 3, 9, 17, 30, 40), strict=True)}
    for name in texts:
        runner.open(name, rows=1, max_length=80)
    runner.run([StepInput(name, ids, WANT_NOTHING) for name, ids in texts.items()])
    for step in range(25):
        if step == 10:
            runner.close("c")
            del texts["c"]
        chosen = [name for name in texts if torch.rand(1, generator=generator) < 0.7]
        works = [StepInput(name, torch.randint(0, 99, (1, 1), generator=generator)) for name in chosen]
        for work, result in zip(works, runner.run(works), strict=True):
            texts[work.session_id] = torch.cat([texts[work.session_id], work.x], dim=1)
            assert result.session_id == work.session_id
            assert result.start == texts[work.session_id].shape[1] - 1
            assert close(result.output, expected(model, texts[work.session_id])[:, -1:])
    assert any(len(cohort.members) > 1 for cohort in runner.pool.cohorts)


def test_one_that_lags_when_its_cohort_is_formed_anew_keeps_its_place(model, runner):
    texts = {name: ids_of(9, seed=seed) for seed, name in enumerate("abc")}

    def step(*names: str) -> None:
        works = [StepInput(name, ids_of(1, seed=texts[name].shape[1])) for name in names]
        for work, result in zip(works, runner.run(works), strict=True):
            texts[work.session_id] = torch.cat([texts[work.session_id], work.x], dim=1)
            assert close(result.output, expected(model, texts[work.session_id])[:, -1:])

    for name, ids in texts.items():
        runner.open(name, rows=1, max_length=60)
        runner.run([StepInput(name, ids, WANT_NOTHING)])
    step("a", "b", "c")
    step("b", "c")  # a is taken along, and lags
    runner.close("c")
    step("a", "b")
    step("a", "b")


@pytest.mark.parametrize("seed", range(4))
def test_steps_and_replays_in_any_mix(model, runner, seed):
    """Backlogs of several positions come between the steps of others, as they do after a fault."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    texts: dict[int, torch.Tensor] = {}
    for number in range(40):
        if number % 8 == 0:
            texts[number] = ids_of(0)
            runner.open(number, rows=1, max_length=99)
        if number % 12 == 11:
            runner.close(min(texts))
            del texts[min(texts)]
        chosen = [name for name in texts if draw(4)]
        lengths = [(1, 1, 1, 2, 7)[draw(5)] for _ in chosen]
        works = [StepInput(name, ids_of(length, seed=draw(99))) for name, length in zip(chosen, lengths, strict=True)]
        for work, result in zip(works, runner.run(works), strict=True):
            texts[work.session_id] = torch.cat([texts[work.session_id], work.x], dim=1)
            assert close(result.output, expected(model, texts[work.session_id])[:, -1:])


def test_a_steady_set_copies_nothing(runner):
    for name in "abc":
        runner.open(name, rows=1, max_length=60)
        runner.run([StepInput(name, ids_of(9))])
    runner.run([StepInput(name, ids_of(1)) for name in "abc"])
    (cohort,) = runner.pool.cohorts
    address = cohort.buffers[0][0].data_ptr()
    for _ in range(20):
        runner.run([StepInput(name, ids_of(1)) for name in "cab"])
    assert runner.pool.cohorts == [cohort]
    assert cohort.buffers[0][0].data_ptr() == address


def test_left_padding(model, runner):
    ids = ids_of(12, rows=3)
    padding = (0, 5, 2)
    mask = (torch.arange(13) >= torch.tensor(padding)[:, None]).long()
    runner.open("p", rows=3, max_length=32, padding=padding)
    runner.open("q", rows=1, max_length=32)
    runner.run([StepInput("p", ids, WANT_NOTHING), StepInput("q", ids_of(4), WANT_NOTHING)])
    step = ids_of(1, rows=3, seed=5)
    result, _ = runner.run([StepInput("p", step), StepInput("q", ids_of(1))])
    whole = expected_padded(model, torch.cat([ids, step], 1), mask)
    assert close(result.output, whole[:, -1:])


@torch.inference_mode()
def expected_padded(model, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def test_truncate_and_reorder(model, runner):
    ids = ids_of(10, rows=2)
    runner.open("b", rows=2, max_length=32)
    runner.open("other", rows=1, max_length=32)
    runner.run([StepInput("b", ids, WANT_NOTHING), StepInput("other", ids_of(6), WANT_NOTHING)])
    runner.run([StepInput("b", ids_of(1, rows=2)), StepInput("other", ids_of(1))])  # side by side now
    runner.truncate("b", 7)
    assert (runner.length("b"), runner.length("other")) == (7, 7)
    step = ids_of(1, rows=2, seed=9)
    (result,) = runner.run([StepInput("b", step, reorder=(1, 1))])
    assert close(result.output, expected(model, torch.cat([ids[[1, 1], :7], step], 1))[:, -1:])
    (result,) = runner.run([StepInput("other", step[:1])])
    assert close(result.output, expected(model, torch.cat([ids_of(6), ids_of(1), step[:1]], 1))[:, -1:])


def test_a_session_may_use_part_of_the_span(model, checkpoint, span, runner):
    """Mid-span entry and exit give what spans of just those units give."""
    ids = ids_of(6)
    first = StageRunner(load_span(checkpoint, 0, 2), RunnerConfig(1 << 20))
    first.open(0, rows=1, max_length=8)
    (entering,) = first.run([StepInput(0, ids)])
    runner.open("middle", rows=1, max_length=8, start=2, end=4)
    runner.open("rest", rows=1, max_length=8, start=4)
    runner.open("head", rows=1, max_length=8, start=5)
    runner.open("embedding", rows=1, max_length=8, end=1)
    (middle,) = runner.run([StepInput("middle", entering.output)])
    (rest,) = runner.run([StepInput("rest", middle.output, WANT_ALL)])
    assert close(rest.output, expected(model, ids))
    (embedded,) = runner.run([StepInput("embedding", ids)])
    assert torch.equal(embedded.output, model.model.embed_tokens(ids))
    (logits,) = runner.run([StepInput("head", embedded.output, WANT_ALL)])
    assert close(logits.output, model.lm_head(model.model.norm(embedded.output)))


def test_a_pass_that_failed_leaves_no_trace(model, runner, monkeypatch):
    ids = ids_of(5)
    runner.open("a", rows=1, max_length=32)
    runner.run([StepInput("a", ids)])
    layer = runner.span.model.model.layers._modules["3"]
    monkeypatch.setattr(layer, "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        runner.run([StepInput("a", ids_of(1))])
    monkeypatch.undo()
    (result,) = runner.run([StepInput("a", ids_of(1))])
    assert close(result.output, expected(model, torch.cat([ids, ids_of(1)], 1))[:, -1:])


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (torch.zeros(1, 1), ErrorCode.MALFORMED),
        (torch.zeros(2, 1, dtype=torch.int64), ErrorCode.MALFORMED),
        (torch.zeros(1, 0, dtype=torch.int64), ErrorCode.MALFORMED),
        (torch.full((1, 2), 99), ErrorCode.MALFORMED),
        (torch.full((1, 2), -1), ErrorCode.MALFORMED),
        (torch.zeros(1, 9, dtype=torch.int64), ErrorCode.TOO_LARGE),
    ],
)
def test_bad_input_is_refused(runner, x, code):
    runner.open("a", rows=1, max_length=8)
    with pytest.raises(ProtocolError) as caught:
        runner.run([StepInput("a", x)])
    assert caught.value.code == code
    assert runner.length("a") == 0


def test_sessions_that_cannot_be_are_refused(runner):
    with pytest.raises(ProtocolError) as caught:
        runner.run([StepInput("nobody", ids_of(1))])
    assert caught.value.code == ErrorCode.NO_SESSION
    with pytest.raises(ProtocolError) as caught:
        runner.open("a", rows=1, max_length=8, start=3, end=9)
    assert caught.value.code == ErrorCode.WRONG_SPAN
    with pytest.raises(OutOfCache, match="of cache would be reserved"):
        runner.open("a", rows=1, max_length=1 << 30)
    assert "a" not in runner


def test_finite():
    x = torch.full((1000,), 1e38)
    assert is_finite(x)  # though its sum is not
    x[7] = float("nan")
    assert not is_finite(x)
    x[7] = float("inf")
    assert not is_finite(x)
    assert is_finite(torch.empty(0))
