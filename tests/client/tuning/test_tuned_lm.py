"""A swarm's model as a torch module trains as peft does in one process, with its head here or in the swarm."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from swarmnode.client.tuning.client import ModuleParts, ModuleSettings, chosen_adapter
from swarmnode.client.tuning.tuned_lm import Run, TunedCausalLM
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.training.adapters.adapter_recipe import NO_METHOD, AdapterRecipe
from swarmnode.compute.training.adapters.held_ends import HeldEnds
from swarmnode.errors import CheckpointError, NotFinite, UsageError
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.tuning.adapter_parts import narrowed
from swarmnode.tuning.client.remote_layers import RemoteLayers
from swarmnode.tuning.client.route_opener import LocalOpener
from swarmnode.tuning.client.state_shapes import StateShapes
from tests.compute.training.adapters.trained import SMALL, batch_of, labels_of
from tests.gateway.speaking import SPECIALS, save_speaking_llama
from tests.numerics.adapter_peft import PeftTraining
from tests.numerics.test_adapter_training import save_family

STEPS, RATE = 4, 5e-3
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about names that peft uses
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
IDS = batch_of(0)[0][0]
LORA = replace(SMALL, targets=("q_proj", "v_proj", "lm_head"))


@dataclass
class Place:
    """A model on disk, and the client's loop."""

    run: Run
    model: Any
    checkpoint: Checkpoint

    @contextmanager
    def module(self, recipe: AdapterRecipe, weights: Any = None, **settings: Any) -> Iterator[TunedCausalLM]:
        """The module, whose layers are in this process."""
        chosen = ModuleSettings(recipe, **{"positions": 32, **settings})
        units, ends, ledger = self.checkpoint.units, None, MemoryLedger()
        span = load_span(self.checkpoint, 0, units, dtype=torch.float32, check=False)
        if chosen.holds_ends:
            ends = HeldEnds.load(self.checkpoint, recipe)
            span = narrowed(span, Span(1, units - 1))

        async def made() -> Executor:
            return Executor()

        async def ended() -> None:
            await executor.call(Urgency.CONTROL, lambda: None, kind="wait", owner="test")
            await executor.close()

        executor = self.run(made())
        opener = LocalOpener(span, executor, recipe, (chosen.rows, chosen.positions))
        shapes = StateShapes.of(self.checkpoint.family, recipe).units
        layers = RemoteLayers(
            opener, {unit: shapes[unit] for unit in range(span.start, span.end)}, chosen.window, ledger
        )
        module = TunedCausalLM(self.run, ModuleParts(chosen, self.checkpoint.family, layers, ends, "tiny", weights))
        yield module
        module.close()
        assert ledger.accounts()[Account.ACTIVATIONS] == 0
        self.run(ended())
        assert span.adapters.ledger.used_bytes == 0, "nothing stays"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    model, checkpoint = save_family("llama", tmp_path_factory.mktemp("llama"))
    yield Place(lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60), model, checkpoint)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def plain_loop(module: TunedCausalLM, steps: int) -> list[float]:
    """All microbatches of a step are in flight at once."""
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        count = labels_of(batch, module.model.recipe)
        found = [module(ids, labels=labels, num_items_in_batch=count).loss for ids, labels in batch]
        for loss in reversed(found):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.model.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found))
    return losses


@needs_peft
@pytest.mark.parametrize(
    ("recipe", "holds_ends"),
    [
        (LORA, True),
        (replace(SMALL, method="lora-fa"), True),
        (replace(SMALL, method="dora", targets=("o_proj", "lm_head")), True),
        (replace(SMALL, method="prompt"), True),
        (SMALL, False),
    ],
)
def test_a_plain_loop_draws_the_curve_of_peft(
    place: Place, tmp_path: Path, recipe: AdapterRecipe, holds_ends: bool
) -> None:
    with place.module(recipe, holds_ends=holds_ends) as module:
        module.save_pretrained(tmp_path / "start")
        starts = safetensors.torch.load_file(tmp_path / "start" / "adapter_model.safetensors")
        theirs = PeftTraining(place.model, recipe, starts, RATE, tmp_path / "peft")
        if recipe.method == "lora-fa":  # whose optimiser is peft's own
            theirs.optimizer = torch.optim.AdamW(theirs._parameters, lr=RATE, weight_decay=0.0)
        assert plain_loop(module, STEPS) == pytest.approx(theirs.train(range(STEPS)), rel=1e-4)
        if holds_ends:
            wanted = theirs.logits(IDS)[:, -IDS.shape[1] :]
            with torch.no_grad():
                given = module(IDS).logits
            assert float((given - wanted).abs().max()) < 1e-4 * float(wanted.std())
        module.save_pretrained(tmp_path / "out")
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"


@needs_accelerate
def test_a_trainer_draws_the_curve_of_a_plain_loop_and_goes_on_from_its_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    def trained(module: TunedCausalLM, **options: Any) -> list[float]:
        batches = [batch for step in range(2) for batch in batch_of(step)]
        rows = [{"input_ids": ids, "labels": labels} for batch in batches for ids, labels in zip(*batch, strict=True)]
        arguments = TrainingArguments(
            str(tmp_path / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, save_steps=1,
            learning_rate=RATE, lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            train_sampling_strategy="sequential", weight_decay=0.0, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(module, arguments, train_dataset=rows)
        trainer.train(**options)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with place.module(LORA) as module:
        losses = trained(module)
    with place.module(LORA) as module:
        assert plain_loop(module, 2) == pytest.approx(losses, rel=1e-4)
    with place.module(LORA) as module:
        again = trained(module, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert again[-1] == pytest.approx(losses[1], rel=1e-4)


@needs_peft
def test_trl_trains_it_as_it_trains_peft_s_model(place: Place, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_speaking_llama(tmp_path / "model")
    speaking = replace(place, checkpoint=Checkpoint(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", eos_token=SPECIALS[0], pad_token=SPECIALS[0])

    def trained(model: Any) -> list[float]:
        settings = trl.SFTConfig(
            str(tmp_path / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, bf16=False,
            learning_rate=RATE, lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", max_length=24,
        )  # fmt: skip
        rows = datasets.Dataset.from_dict({"text": ["hello there", "what is it", "two and two", "a b c d e"] * 4})
        trainer = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with speaking.module(SMALL) as module:
        module.save_pretrained(tmp_path / "start")
        losses = trained(module)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(whole, tmp_path / "start", is_trainable=True)
    assert losses == pytest.approx(trained(theirs), rel=1e-4)


def test_the_owners_own_parameters_train_through_the_swarm(place: Place, tmp_path: Path) -> None:
    """A soft prompt of the owner, a new head, and the model's own embedding have the gradients of the whole model."""
    head = nn.Linear(place.model.config.hidden_size, 3)
    prompt_PH = nn.Parameter(torch.randn(4, place.model.config.hidden_size, generator=torch.manual_seed(0)))
    found = []
    with place.module(AdapterRecipe(method=NO_METHOD)) as module:
        for model in (module, place.model):
            old, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            embedding.requires_grad_()
            model.set_output_embeddings(head)
            embedded_BTH = torch.cat((prompt_PH.expand(len(IDS), -1, -1), embedding(IDS)), dim=1)
            logits_BC = model(inputs_embeds=embedded_BTH).logits[:, -1]
            nn.functional.cross_entropy(logits_BC, torch.tensor([0, 2])).backward()
            trained = [prompt_PH, *head.parameters(), embedding.weight]
            found.append([one.grad.clone() for one in trained if one.grad is not None])
            for one in trained:
                one.grad = None
            if model is module:
                module.register_parameter("soft_prompt", prompt_PH)
                module.save_pretrained(tmp_path)
            model.set_output_embeddings(old)
            embedding.requires_grad_(False)
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
    kept = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(kept["soft_prompt"], prompt_PH) and not (tmp_path / "adapter_config.json").exists()


def test_passes_wait_for_their_gradients_as_in_torch(place: Place) -> None:
    """The window bounds those that something refers to. Those without gradients take no place."""
    with place.module(SMALL, window=2) as module:
        weight = module.get_parameter("model.adapter.model.layers.0.self_attn.q_proj.lora_B.weight")

        def gradient() -> torch.Tensor:
            assert weight.grad is not None
            found, weight.grad = weight.grad.clone(), None
            return found

        module(IDS, labels=IDS).loss.backward()
        alone = gradient()
        first, second = module(IDS, labels=IDS), module(IDS, labels=IDS)
        with torch.no_grad():
            assert torch.equal(module(IDS).logits, first.logits)
        with pytest.raises(UsageError, match="2 passes wait"):
            module(IDS)
        second.loss.backward(retain_graph=True)
        second.loss.backward()  # computed again
        assert torch.allclose(gradient(), 2 * alone, rtol=1e-4)
        with pytest.raises(RuntimeError, match="second time"):
            second.loss.backward()
        (first.loss * torch.inf).backward()
        assert bool(gradient().isnan().all()), "torch's own infinities stay with the owner"
        del first, second
        gc.collect()
        embedding = module.get_input_embeddings().requires_grad_()
        for one in module.model.tensors().values():
            one.requires_grad_(False)
        module(IDS, labels=IDS).loss.backward()
        embedding.requires_grad_(False)
        for one in module.model.tensors().values():
            one.requires_grad_()
        module(IDS, labels=IDS).loss.backward()
        assert torch.allclose(gradient(), alone, rtol=1e-4), "what a frozen adapter would have learnt does not count"
        kept = [module(IDS, labels=IDS) for _ in range(2)]  # the forgotten pass has lost its place
        del kept[0]
        later = module(IDS, labels=IDS)
        with torch.no_grad():
            weight.add_(0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.loss.backward()
        module(IDS, labels=IDS).loss.backward()
        assert not torch.allclose(gradient(), alone)


def test_a_batch_that_does_not_fit_is_refused_in_a_sentence(place: Place) -> None:
    left = torch.tensor([[0] + [1] * (IDS.shape[1] - 1)] * len(IDS))
    calls: dict[str, Callable[[TunedCausalLM], object]] = {
        "padding on the left": lambda module: module(IDS, left),
        "up to 8 rows of 32 tokens": lambda module: module(IDS.repeat(1, 9)),
        "vocabulary": lambda module: module(IDS + 1000),
        "input_ids or inputs_embeds": lambda module: module(),
    }
    with place.module(SMALL) as module:
        for words, call in calls.items():
            with pytest.raises(UsageError, match=words):
                call(module)
        padded = module(IDS, (torch.arange(IDS.shape[1]) < 9).long().expand(IDS.shape), labels=IDS).loss
        assert padded.item() != module(IDS, labels=IDS).loss.item(), "padding has no labels"
        with torch.no_grad():
            next(iter(module.model.tensors().values())).fill_(torch.nan)
        with pytest.raises(NotFinite, match="weights are NaN"):
            module(IDS)
    with place.module(SMALL, holds_ends=False) as module:
        with pytest.raises(UsageError, match="ends are in the swarm"):
            module(IDS)
        with pytest.raises(UsageError, match="are in the swarm"):
            module.get_output_embeddings()


def test_rows_of_several_documents_are_those_documents(place: Place) -> None:
    with place.module(SMALL) as module, torch.no_grad():
        places = torch.cat((torch.arange(5), torch.arange(7)))[None]
        whole = module(IDS[:1], position_ids=places).logits
        assert torch.allclose(whole[:, 5:], module(IDS[:1, 5:]).logits, atol=1e-5)


def test_an_adapter_is_a_recipe_a_config_of_peft_or_a_folder(place: Place, tmp_path: Path) -> None:
    with place.module(LORA) as module:
        plain_loop(module, 2)
        module.save_pretrained(tmp_path)
        with torch.no_grad():
            logits = module(IDS).logits
    recipe, weights = chosen_adapter(tmp_path)
    assert recipe == replace(AdapterRecipe(), rank=LORA.rank, alpha=LORA.alpha, targets=tuple(sorted(LORA.targets)))
    with place.module(recipe, weights) as module, torch.no_grad():
        assert torch.equal(module(IDS).logits, logits), "it goes on where it was saved"
    assert chosen_adapter({"rank": 4, "targets": ["q_proj"]})[0].targets == ("q_proj",)
    assert chosen_adapter(None)[0].method == NO_METHOD
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": {"q_proj"}, "use_dora": True}
    assert chosen_adapter(fields)[0] == AdapterRecipe("dora", 4, 8, ("q_proj",))
    for wrong, words in (
        ({"rang": 4}, "rang"),
        ({**fields, "lora_dropout": 0.1}, "lora_dropout"),
        ({**fields, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({**fields, "target_modules": "q.*"}, "target_modules"),
        ({**fields, "peft_type": "LOHA"}, "LOHA"),
        ("verse", "give the folder"),
    ):
        with pytest.raises(UsageError, match=words):
            chosen_adapter(wrong)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError):
        chosen_adapter(tmp_path)
