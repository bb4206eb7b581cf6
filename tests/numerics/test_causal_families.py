"""Each type that transformers maps to a class of causal language models is served, or refused for a known reason."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Gemma3ForConditionalGeneration, Qwen3_5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import causal_class, family_of
from swarmnode.compute.model.fresh import tiny_config as tiny_config_of
from swarmnode.compute.serving.loading import check_family, load_span
from swarmnode.compute.serving.runner import WANT_ALL, RunnerConfig, StageRunner, StepInput
from swarmnode.errors import CheckpointError
from tests.numerics.families import FAMILIES, RECURRENT, causal_config, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
COMPANY, TOKENS, NEVER_ENDS, REPLAYED = 8, 4, -1, 0
NO_CONFIG = {"gemma4_assistant"}  # its default config is not valid
# Whose `generate` computes other numbers than a whole pass (a mask token behind the text, a window of the cache alone, positions
# that begin at 0), or takes no sizes as tiny as these: whole passes tell the text.
WHOLE_PASSES = {"xlm", "moshi", "xmod", "hrm_text", "xlstm"}
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def refused() -> tuple[frozenset[str], frozenset[str]]:
    """Refused types by the page: of decoder-only models of text, and of others."""
    text = PAGE.read_text().partition("<!-- refused families -->")[2].partition("<!-- end -->")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    others = [row for row in rows if "no decoder-only" in row]
    return tuple(frozenset(re.findall(r"`([\w-]+)`", " ".join(some))) for some in (set(rows) - set(others), others))  # type: ignore[return-value]


@cache
def followed() -> dict[str, bool]:
    """Types of which the page says that their layers' calls are followed, and whether each pass computes all positions again."""
    texts = (PAGE.read_text().partition(f"<!-- families {how} -->")[2] for how in ("with caches", "computed again"))
    found = (re.findall(r"`([\w-]+)`", text.partition("<!-- end -->")[0]) for text in texts)
    return {name: is_again for is_again, names in enumerate(found) for name in names}


@pytest.mark.parametrize("model_type", [each for each in CAUSAL if each not in {**FAMILIES, **RECURRENT}])
def test_a_family_is_served_or_refused_in_a_sentence(model_type: str) -> None:
    text, others = refused()
    if model_type in NO_CONFIG:
        assert model_type in others
        return
    config = causal_config(model_type)
    if model_type not in text | others:
        family = check_family(family_of(config))
        told = followed().get(model_type)
        assert (family.calls is not None, family.computes_again) == (told is not None, bool(told))
        return
    with pytest.raises(CheckpointError):
        check_family(family_of(config))


def test_the_page_counts_what_is_served() -> None:
    told = re.search(
        r"transformers (\S+) has (\d+) such families: (\d+) of them .* (\d+) of the (\d+)", PAGE.read_text()
    )
    assert told is not None
    text, others = refused()
    assert not (text | others) & set(FAMILIES | RECURRENT)
    if told.group(1) == transformers.__version__:
        served = len(set(CAUSAL) - text - others)
        assert [int(told.group(n)) for n in range(2, 6)] == [len(CAUSAL), served, served, len(CAUSAL) - len(others)]


@pytest.mark.parametrize("model_type", followed())
@torch.inference_mode()
def test_the_text_of_a_family_whose_calls_are_followed_is_its_own(model_type: str, tmp_path: Path) -> None:
    """Eight sessions of other lengths, prompts in chunks and then token by token with a wrong guess each, in one, two and three
    stages, draw the tokens that transformers' `generate` draws from each prompt alone. So does one that gets a text once more."""
    config = tiny_config_of(causal_config(model_type))
    torch.manual_seed(0)
    model = causal_class(config)(config).float().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    prompts = {length: torch.randint(2, config.vocab_size, (1, length)) for length in range(3, 3 + COMPANY)}
    options = {"do_sample": False, "eos_token_id": NEVER_ENDS, "pad_token_id": 0}
    if model_type in WHOLE_PASSES:

        def prepared(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> dict[str, Any]:
            return {"input_ids": input_ids, "use_cache": False}

        model.prepare_inputs_for_generation = prepared
    wanted = {
        length: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **options)
        for length, ids in prompts.items()
    }
    checkpoint = Checkpoint(tmp_path)
    check_tensors(checkpoint)
    middle = checkpoint.units // 2
    for cuts in ((0, checkpoint.units), (0, middle, checkpoint.units), (0, 2, middle + 1, checkpoint.units)):
        runners = [StageRunner(load_span(checkpoint, *cut), RunnerConfig(1 << 26)) for cut in pairwise(cuts)]
        texts = prompts if len(cuts) == 3 else {COMPANY: prompts[COMPANY]}
        for runner in runners:
            for name in (*texts, REPLAYED):
                runner.open(name, rows=1, max_length=32)
        inputs = {name: [ids[:, :2], ids[:, 2:]] for name, ids in texts.items()}
        lengths = dict.fromkeys(texts, 0)
        for _ in range(TOKENS + 1):
            new = {name: parts.pop(0) for name, parts in inputs.items()}
            guessed = {name: torch.cat([ids, (ids[:, -1:] + 1) % config.vocab_size], 1) for name, ids in new.items()}
            logits = pass_on(
                runners,
                [StepInput(name, ids, WANT_ALL, truncate_to=lengths[name], guessed=1) for name, ids in guessed.items()],
            )
            for name, ids in new.items():
                lengths[name] += ids.shape[1]
                if not inputs[name]:
                    inputs[name] = [logits[name][:, -2:-1].argmax(-1)]
                    texts = {**texts, name: torch.cat([texts[name], *inputs[name]], 1)}
        assert all(torch.equal(texts[name], wanted[name]) for name in texts), cuts
        whole = wanted[COMPANY]
        assert torch.equal(pass_on(runners, [StepInput(REPLAYED, whole[:, :-1])])[REPLAYED].argmax(-1), whole[:, -1:])


def pass_on(runners: list[StageRunner], works: list[StepInput]) -> dict[Any, torch.Tensor]:
    """Run works through all stages, and return the logits by session."""
    for runner in runners:
        outputs = runner.run(works)
        works = [replace(work, x=each.output) for work, each in zip(works, outputs, strict=True)]
    return {work.session_id: work.x for work in works}


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
@torch.inference_mode()
def test_the_language_model_of_a_larger_one_is_served(name: str, tmp_path: Path) -> None:
    """A checkpoint as it is published, with an image encoder: only the language model's tensors are read."""
    vision: dict[str, dict[str, Any]] = {
        "gemma3": {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "qwen3_5": {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
    }
    text = tiny_config(f"{name}_text").to_dict()
    widths = {"hidden_size": 32, "intermediate_size": 32, **vision[name]}
    config = CONFIG_MAPPING[name](text_config=text, vision_config=widths)
    torch.manual_seed(0)
    classes = {"gemma3": Gemma3ForConditionalGeneration, "qwen3_5": Qwen3_5ForConditionalGeneration}
    model = classes[name](config).eval()
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    check_tensors(checkpoint)
    seen = [entry for entry in checkpoint.entries if "visual" in entry or "vision" in entry]
    assert seen and not any(checkpoint.family.units_of_tensor(entry) for entry in seen)
    ids_BT = torch.randint(2, 80, (1, 12))
    x = ids_BT
    for start, end in ((0, 3), (3, 6)):
        runner = StageRunner(load_span(checkpoint, start, end), RunnerConfig(1 << 24))
        runner.open("one", rows=1, max_length=16)
        x = runner.run([StepInput("one", x, WANT_ALL)])[0].output
    assert torch.allclose(x, model(input_ids=ids_BT, use_cache=False).logits, atol=1e-5)
