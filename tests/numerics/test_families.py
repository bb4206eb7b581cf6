"""Split equals whole: three spans with cohort caches give what transformers' own model and `generate` give, family by family."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.compute.model.checkpoint import Checkpoint, load_config
from swarmnode.compute.model.family import family_of
from swarmnode.compute.serving.cohort import Window, sliding_layers
from swarmnode.compute.serving.loading import check_family, load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.saved_activations import Gradients, accumulate, leaves
from swarmnode.errors import CheckpointError
from tests.numerics.families import FAMILIES, REFUSED, causal_config, tiny_config

TOLERANCE = 1e-4  # of the logits' standard deviation; float32, whose sums depend on the order
NEW_TOKENS = 8
PADDING = (0, 4)
pytestmark = pytest.mark.filterwarnings("ignore")


class Pipeline:
    """The spans of a checkpoint, run one after another as the hops of a route would."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint(path)
        cuts = [0, 2, 4, checkpoint.units]
        spans = [load_span(checkpoint, start, end, check=False) for start, end in pairwise(cuts)]
        windows = {layer: Window(size, room=2) for layer, size in sliding_layers(spans[0].config).items()}
        self.runners = [StageRunner(span, RunnerConfig(1 << 24, windows=windows)) for span in spans]

    def open(self, session_id: Any, **options: Any) -> None:
        for runner in self.runners:
            runner.open(session_id, max_length=64, **options)

    def run(self, works: list[StepInput]) -> list[torch.Tensor]:
        for runner in self.runners:
            results = runner.run(works)
            works = [
                StepInput(work.session_id, result.output, work.want, truncate_to=work.truncate_to)
                for work, result in zip(works, results, strict=True)
            ]
        return [result.output for result in results]

    def generate(self, inputs: dict[Any, torch.Tensor]) -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
        """Greedy (ids, logits) of NEW_TOKENS tokens per session, all sessions in step."""
        ids: dict[Any, list[torch.Tensor]] = {name: [] for name in inputs}
        logits: dict[Any, list[torch.Tensor]] = {name: [] for name in inputs}
        for _ in range(NEW_TOKENS):
            outputs = self.run([StepInput(name, x) for name, x in inputs.items()])
            for name, output in zip(ids, outputs, strict=True):
                logits[name].append(output)
                ids[name].append(output.argmax(-1))
            inputs = {name: drawn[-1] for name, drawn in ids.items()}
        return {name: (torch.cat(ids[name], 1), torch.cat(logits[name], 1)) for name in ids}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(whole model, path of its sharded checkpoint): random in every tensor, so that nothing is one or zero by default."""
    if request.param not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(request.param), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size="40KB")
    return model, path


def whole_generate(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest, as a share of the standard deviation."""
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.std())


@torch.inference_mode()
def test_split_equals_whole(family: tuple[Any, Path]) -> None:
    """Prompt logits, left padding, and a cohort of different lengths against each alone, in one pipeline."""
    model, path = family
    pipeline = Pipeline(path)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (2, 11), generator=generator)
    mask = (torch.arange(11) >= torch.tensor(PADDING)[:, None]).long()
    padded_ids = ids * mask  # the padding token is 0
    prompts = {length: ids[:1, :length] for length in (3, 11, 7)}

    pipeline.open("all", rows=1)
    (logits,) = pipeline.run([StepInput("all", ids[:1], WANT_ALL)])
    assert difference(logits, model(ids[:1]).logits) < TOLERANCE

    pipeline.open("padded", rows=2, padding=PADDING)
    drawn = pipeline.generate({"padded": padded_ids})["padded"]
    expected = whole_generate(model, padded_ids, mask)
    assert difference(drawn[1], expected[1]) < TOLERANCE
    assert torch.equal(drawn[0], expected[0])

    for length in prompts:
        pipeline.open(length, rows=1)
    together = pipeline.generate(prompts)
    assert len({id(runner.pool.sessions[length].cohort) for runner in pipeline.runners for length in prompts}) == 3
    for length, prompt in prompts.items():
        expected = whole_generate(model, prompt)
        assert difference(together[length][1], expected[1]) < TOLERANCE
        assert torch.equal(together[length][0], expected[0])
    assert_ragged_steps_are_exact(pipeline, model, {n: torch.cat([prompts[n], together[n][0]], 1) for n in prompts})


def test_gradients_of_three_pieces_are_those_of_the_whole(family: tuple[Any, Path]) -> None:
    model, path = family
    ids_BT = torch.randint(2, 97, (2, 9))
    model.train().zero_grad()
    loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    loss.backward()
    checkpoint, values = Checkpoint(path), (ids_BT,)
    passed = []
    for start, end in pairwise([0, 2, 4, checkpoint.units]):
        segment = load_segment(checkpoint, start, end)
        inputs = leaves(values, start)
        outputs = segment.forward(inputs, start, end, 0, (ids_BT,))
        passed.append((segment, inputs, outputs))
        values = tuple(output.detach() for output in outputs)
    assert values[0].item() == pytest.approx(loss.item(), rel=1e-5)
    gradients: Gradients = (torch.ones(()),)
    found: dict[str, torch.Tensor] = {}
    for segment, inputs, outputs in reversed(passed):
        gradients = accumulate(outputs, gradients, inputs)
        for named in segment.parameters().values():
            for name, parameter in named.items():
                if parameter.grad is not None:
                    found[name] = found.get(name, torch.zeros(())) + parameter.grad
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.eval().zero_grad()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name in wanted.keys() | found.keys():
        own = wanted.get(name, torch.zeros(()))
        assert float((found.get(name, torch.zeros_like(own)) - own).norm()) < 1e-5 * largest, name


def assert_ragged_steps_are_exact(pipeline: Pipeline, model: Any, texts: dict[int, torch.Tensor]) -> None:
    """Two and one of the last tokens are taken back; one, two and two new positions go together."""
    held = {
        name: ids.shape[1] - 1 - taken_back for (name, ids), taken_back in zip(texts.items(), (2, 0, 1), strict=True)
    }
    steps = {name: texts[name][:, :count] for name, count in zip(texts, (1, 2, 2), strict=True)}
    works = [StepInput(name, x, WANT_ALL, truncate_to=held[name]) for name, x in steps.items()]
    for (name, x), logits in zip(steps.items(), pipeline.run(works), strict=True):
        text = torch.cat([texts[name][:, : held[name]], x], dim=1)
        assert difference(logits, model(text).logits[:, -x.shape[1] :]) < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
@torch.inference_mode()
def test_the_comparison_notices_a_wrong_weight(model_type: str, tmp_path: Path) -> None:
    """The control: one matrix of one layer off by two per cent is far outside the tolerance."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    pipeline = Pipeline(tmp_path)
    ids = torch.randint(2, 97, (1, 11))
    layer = next(iter(pipeline.runners[1].span.stack._modules.values()))
    matrix = max(layer.parameters(), key=lambda parameter: parameter.numel())
    matrix.mul_(1.02)
    pipeline.open(0, rows=1)
    (logits,) = pipeline.run([StepInput(0, ids, WANT_ALL)])
    assert difference(logits, model(ids).logits) > 3 * TOLERANCE


@pytest.mark.parametrize(("model_type", "reason"), REFUSED.items())
def test_refused_with_the_reason(model_type: str, reason: str) -> None:
    """Before anything is loaded, in one line."""
    options: dict[str, Any] = {}
    if model_type == "mixtral":
        options = {"output_router_logits": True}
    with pytest.raises(CheckpointError, match=reason) as caught:
        check_family(family_of(CONFIG_MAPPING[model_type](**options)))
    assert "cannot be" in str(caught.value) or "can be split" in str(caught.value)


def test_quantised_checkpoints_and_foreign_code_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_file = tmp_path / "model.safetensors"
    model_file.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"quantised checkpoint \(gptq\).*create"):
        family_of(load_config(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match="no tensor is"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}')
    with pytest.raises(CheckpointError, match="never run here"):
        Checkpoint(tmp_path).units  # noqa: B018


def test_a_family_whose_positions_see_later_ones_is_refused() -> None:
    """The self-check, not a list of names, refuses what it cannot split."""
    with pytest.raises(CheckpointError, match=r"differs from the whole"):
        config = causal_config("xlm")
        config.causal = False
        check_family(family_of(config))
