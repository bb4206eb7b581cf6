"""The runner against the whole model: continuous batching, chunks, cuts, reordering, and what it refuses."""

from __future__ import annotations

import random

import pytest
import torch

from swarmnode.codec.tensors import LARGEST_VALUE
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.cache import OutOfCache
from swarmnode.compute.serving.device_transfers import finiteness
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import WANT_ALL, WANT_NOTHING, RunnerConfig, StageRunner, StepInput
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
    return one.shape == other.shape and bool(((one - other).abs() < TOLERANCE).all())


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
    draw = random.Random(seed).randrange
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


def test_prompts_of_several_sessions_share_a_pass(model, span, monkeypatch):
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24, prefill_positions=64))
    passes: list[torch.Size] = []
    forward = span.forward
    monkeypatch.setattr(span, "forward", lambda x, **how: passes.append(x.shape) or forward(x, **how))
    texts = {name: ids_of(length, seed=length) for name, length in zip("abc", (12, 16, 14), strict=True)}
    for name in texts:
        runner.open(name, rows=1, max_length=40)
    for result in runner.run([StepInput(name, ids, WANT_ALL) for name, ids in texts.items()]):
        assert close(result.output, expected(model, texts[result.session_id]))
    assert passes == [(3, 16)]
    more = {name: ids_of(9, seed=50 + number) for number, name in enumerate(texts)}
    for result in runner.run([StepInput(name, ids) for name, ids in more.items()]):
        ids = torch.cat([texts[result.session_id], more[result.session_id]], 1)
        assert close(result.output, expected(model, ids)[:, -1:])
    assert passes[1:] == [(3, 9)]


def test_prompts_that_do_not_fit_into_one_pass_go_alone(span, monkeypatch):
    runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 24, prefill_positions=64))
    passes: list[torch.Size] = []
    forward = span.forward
    monkeypatch.setattr(span, "forward", lambda x, **how: passes.append(x.shape) or forward(x, **how))
    for name in "abc":
        runner.open(name, rows=1, max_length=40)
    runner.run([StepInput(name, ids_of(25), WANT_NOTHING) for name in "abc"])
    assert passes == [(1, 25)] * 3


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
    x = torch.full((1000,), LARGEST_VALUE)
    assert finiteness(x)
    for wrong in (1e10, -1e10, float("-inf")):
        x[7] = wrong
        assert not finiteness(x)
    x[7] = float("nan")
    assert not finiteness(x)
    x[7] = float("inf")
    assert not finiteness(x)
    assert finiteness(torch.empty(0))


@pytest.mark.parametrize("seed", range(5))
def test_ragged_steps_equal_lone_passes(model, runner, seed):
    """Steps of any lengths of any sessions, some of which take back what they said: every logit is that of the text alone."""
    draw = random.Random(seed).randrange
    texts: dict[int, torch.Tensor] = {}
    shared = 0
    for number in range(40):
        if number % 6 == 0:
            texts[number] = ids_of(0, rows=1 + draw(2))
            runner.open(number, rows=len(texts[number]), max_length=200)
        if number % 14 == 13:
            runner.close(min(texts))
            del texts[min(texts)]
        works = []
        for name, text in texts.items():
            if not draw(4):
                continue
            cut = max(0, text.shape[1] - draw(6)) if draw(2) else None
            texts[name] = text if cut is None else text[:, :cut]
            count = (1, 1, 2, 3, 5, 8, 11)[draw(7)]
            start = texts[name].shape[1] if draw(2) else None
            x = ids_of(count, rows=len(text), seed=draw(99))
            works.append(StepInput(name, x, want=draw(3), truncate_to=cut, start=start))
        for work, result in zip(works, runner.run(works), strict=True):
            before = texts[work.session_id].shape[1]
            texts[work.session_id] = torch.cat([texts[work.session_id], work.x], dim=1)
            assert (result.session_id, result.start) == (work.session_id, before)
            assert result.output.shape[1] == work.head_positions
            whole = expected(model, texts[work.session_id])
            assert close(result.output, whole[:, whole.shape[1] - work.head_positions :])
        shared = max([shared, *(len(cohort.members) for cohort in runner.pool.cohorts)])
    assert shared > 2


def test_drafts_that_are_taken_back_copy_no_other_row(runner):
    for name in "abc":
        runner.open(name, rows=1, max_length=60)
        runner.run([StepInput(name, ids_of(9))])
    runner.run([StepInput(name, ids_of(4)) for name in "abc"])
    (cohort,) = runner.pool.cohorts
    address = cohort.buffers[0][0].data_ptr()
    for _ in range(10):
        lengths = {name: runner.length(name) for name in "abc"}
        kept = {"a": lengths["a"] - 1, "b": lengths["b"] - 3, "c": lengths["c"] - 2}
        runner.run([StepInput(name, ids_of(4), truncate_to=length) for name, length in kept.items()])
    assert runner.pool.cohorts == [cohort]
    assert cohort.buffers[0][0].data_ptr() == address


@pytest.mark.parametrize("culprits", ["c", "af", "abcdef"])
def test_who_breaks_a_shared_pass_breaks_it_for_nobody_else(model, runner, culprits):
    """Whatever an input does to a pass: the others' results and caches are what they would have been."""

    def break_down(_module: object, inputs: tuple[torch.Tensor]) -> None:
        passes.append(len(inputs[0]))
        if bool((inputs[0] == 98).any()):
            raise IndexError("index out of range in self")

    texts = {
        name: ids_of(length, seed=length) % 98 for name, length in zip("abcdef", (3, 5, 9, 12, 20, 140), strict=True)
    }
    passes: list[int] = []
    for name, ids in texts.items():
        runner.open(name, rows=1, max_length=200)
        runner.run([StepInput(name, ids, WANT_NOTHING)])
    hook = runner.span.model.model.embed_tokens.register_forward_pre_hook(break_down)
    try:
        steps = {name: ids_of(2, seed=len(passes)) % 98 for name in texts}
        works = [StepInput(name, torch.full_like(x, 98) if name in culprits else x) for name, x in steps.items()]
        outcomes = dict(zip(texts, runner.run_each(works), strict=True))
    finally:
        hook.remove()
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, IndexError)} == set(culprits)
    assert len(passes) <= 2 * len(texts)
    for name in texts:
        if name not in culprits:
            texts[name] = torch.cat([texts[name], steps[name]], dim=1)
            assert close(outcomes[name].output, expected(model, texts[name])[:, -1:])
    step = ids_of(1)
    for name, result in zip(texts, runner.run([StepInput(name, step) for name in texts]), strict=True):
        assert close(result.output, expected(model, torch.cat([texts[name], step], dim=1))[:, -1:])


def test_a_step_at_the_end_of_its_session_is_not_filled_up_beyond_it(model, runner):
    """Behind a session's last position the model may have none."""
    seen = []
    hook = runner.span.model.model.layers._modules["0"].register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    texts = {"a": ids_of(10), "b": ids_of(3), "c": ids_of(5)}
    try:
        for name, ids in texts.items():
            runner.open(name, rows=1, max_length=12)
            runner.run([StepInput(name, ids, WANT_NOTHING)])
        counts = {"a": 1, "b": 4, "c": 2}
        works = [StepInput(name, ids_of(count, seed=7)) for name, count in counts.items()]
        for work, result in zip(works, runner.run(works), strict=True):
            text = torch.cat([texts[work.session_id], work.x], dim=1)
            assert close(result.output, expected(model, text)[:, -1:])
    finally:
        hook.remove()
    assert max(seen) < 12


def test_a_fault_of_the_device_is_not_tried_again(runner, monkeypatch):
    passes = []

    def assert_fails(*_args: object, **_options: object) -> None:
        passes.append(1)
        raise RuntimeError("CUDA error: device-side assert triggered")

    for name in "ab":
        runner.open(name, rows=1, max_length=9)
    monkeypatch.setattr(runner.span.model.model.layers._modules["3"], "forward", assert_fails)
    with pytest.raises(RuntimeError, match="device-side"):
        runner.run_each([StepInput(name, ids_of(1)) for name in "ab"])
    assert len(passes) == 1


def test_caches_that_were_lost_while_they_were_copied_are_not_gone_on_from(model, runner, monkeypatch):
    def no_memory(*_: object) -> None:
        raise MemoryError

    for name in "abc":
        runner.open(name, rows=1, max_length=40)
        runner.run([StepInput(name, ids_of(5), WANT_NOTHING)])
    runner.run([StepInput(name, ids_of(1), WANT_NOTHING) for name in "ab"])
    with monkeypatch.context() as patched:
        patched.setattr("swarmnode.compute.serving.cohort._copy_layer", no_memory)
        outcomes = runner.run_each([StepInput(name, ids_of(1)) for name in "ac"])
    assert all(isinstance(outcome, MemoryError) for outcome in outcomes)
    (lost,) = runner.run_each([StepInput("b", ids_of(1))])  # it stood beside a
    assert isinstance(lost, ProtocolError) and lost.code == ErrorCode.INTERNAL
    for name in "abc":
        runner.close(name)
    runner.open("d", rows=1, max_length=9)
    (result,) = runner.run([StepInput("d", ids_of(3), WANT_ALL)])
    assert close(result.output, expected(model, ids_of(3)))


@pytest.mark.parametrize(("start", "cut"), [(4, None), (6, None), (4, 3), (None, 6), (None, -1)])
def test_a_step_that_does_not_follow_is_refused(runner, start, cut):
    runner.open("a", rows=1, max_length=20)
    runner.run([StepInput("a", ids_of(5))])
    with pytest.raises(ProtocolError, match="does not follow"):
        runner.run([StepInput("a", ids_of(1), start=start, truncate_to=cut)])
    assert runner.length("a") == 5


def test_sessions_that_begin_as_another_go_on_as_if_alone(model, runner):
    """While the other goes on, too, and after it is closed."""
    prefix = ids_of(17)
    runner.open("source", rows=1, max_length=64)
    runner.run([StepInput("source", ids_of(17), WANT_NOTHING)])
    texts = {"source": prefix}
    for name, length in (("a", 17), ("b", 12), ("c", 1)):
        runner.open(name, rows=1, max_length=64)
        runner.fork("source", name, length)
        texts[name] = prefix[:, :length]
    for step in range(12):
        if step == 6:
            runner.close("source")
            del texts["source"]
        works = [StepInput(name, ids_of(1 + step % 3, seed=step + len(name))) for name in texts]
        for work, result in zip(works, runner.run(works), strict=True):
            texts[work.session_id] = torch.cat([texts[work.session_id], work.x], dim=1)
            assert close(result.output, expected(model, texts[work.session_id])[:, -1:])


def test_nothing_begins_as_what_is_not_there(runner):
    runner.open("source", rows=1, max_length=64)
    runner.run([StepInput("source", ids_of(9), WANT_NOTHING)])
    runner.open("two rows", rows=2, max_length=64)
    runner.open("units", rows=1, max_length=64, start=0, end=1)
    for source, name in (("source", "two rows"), ("source", "units"), ("unknown", "two rows"), ("source", "unknown")):
        with pytest.raises(ProtocolError):
            runner.fork(source, name, 3)
