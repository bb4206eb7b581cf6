"""Guesses of a prediction layer (MTP) or an EAGLE head are those of the published description, whatever its caches hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.mtp import MtpLayer, check_eagle, load_eagle, load_mtp, mtp_bytes, mtp_tensors
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.serving import mtp_guesses
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.mtp_guesses import GUESSES, PATIENCE, RETRY, DrawnStates, MtpGuesses
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput
from swarmnode.compute.stopwatch import Throttle
from swarmnode.errors import CheckpointError
from swarmnode.ledger import Account, MemoryLedger
from tests.llama import save_llama
from tests.mtp import LAYERS, WEIGHTS, save_eagle, save_mtp

FolderOf = Callable[[str], Path]


class ByThePaper:
    """M [RMSNorm(h); RMSNorm(Emb(t))] -> transformer block -> head, over the whole text at once, with transformers' modules."""

    def __init__(self, folder: Path) -> None:
        self.main: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stored = load_file(folder / WEIGHTS)
        prefix = f"model.layers.{LAYERS}."
        self.own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        self.block: Any = AutoModelForCausalLM.from_pretrained(folder / "layer", dtype=torch.float32)
        self.block.model.norm = torch.nn.Identity()

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.main.config.rms_norm_eps).rsqrt() * weight

    @torch.inference_mode()
    def states(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """States (T, H) that leave the model's last layer, and those behind its final norm."""
        left: list[Tensor] = []
        hook = self.main.model.norm.register_forward_pre_hook(lambda _norm, inputs: left.append(inputs[0][0]))
        normal_BTH: Tensor = self.main.model(torch.tensor([ids])).last_hidden_state
        hook.remove()
        return left[0], normal_BTH[0]

    @torch.inference_mode()
    def guesses(self, hidden_TH: Tensor, ids: list[int]) -> tuple[int, ...]:
        """Guesses behind `ids`; each further one by the layer's own last state."""
        found: tuple[int, ...] = ()
        for _ in range(GUESSES):
            embedded = self.own["embed_tokens.weight"][torch.tensor(ids)]
            joined = [self.normal(embedded, self.own["enorm.weight"]), self.normal(hidden_TH, self.own["hnorm.weight"])]
            x = torch.cat(joined, dim=-1) @ self.own["eh_proj.weight"].T
            left = self.block.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            head = self.own["shared_head.head.weight"]
            token = int((self.normal(left, self.own["shared_head.norm.weight"]) @ head.T).argmax())
            hidden_TH = torch.cat([hidden_TH, self.normal(left, self.main.model.norm.weight)[None]])
            ids, found = [*ids, token], (*found, token)
        return found


class ByTheEaglePaper(ByThePaper):
    """fc [Emb(t); h] -> transformer block without its first norm -> head; h is behind the model's final norm."""

    def __init__(self, folder: Path, head: Path) -> None:
        super().__init__(folder)
        self.own = load_file(head / WEIGHTS)
        self.block = AutoModelForCausalLM.from_config(Checkpoint(head).config, dtype=torch.float32)
        layer = {name: tensor for name, tensor in self.own.items() if name.startswith("layers.")}
        lacking = self.block.model.load_state_dict(layer, strict=False).missing_keys
        assert sorted(lacking) == ["embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight"]
        self.block.model.layers[0].input_layernorm = self.block.model.norm = torch.nn.Identity()

    @torch.inference_mode()
    def guesses(self, hidden_TH: Tensor, ids: list[int]) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for _ in range(GUESSES):
            joined = torch.cat([self.own["embed_tokens.weight"][torch.tensor(ids)], hidden_TH], dim=-1)
            x = joined @ self.own["fc.weight"].T + self.own["fc.bias"]
            left = self.block.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            token = int((left @ self.main.lm_head.weight.T).argmax())
            hidden_TH, ids, found = torch.cat([hidden_TH, left[None]]), [*ids, token], (*found, token)
        return found


def spans(folder: Path, eagle: Path | None = None) -> tuple[ModelSpan, MtpGuesses]:
    checkpoint = Checkpoint(folder)
    span = load_span(checkpoint, 0, checkpoint.units, dtype=torch.float32, check=False)
    layer = load_mtp(checkpoint, span) if eagle is None else load_eagle(Checkpoint(eagle), checkpoint, span)
    span.reader = layer
    return span, MtpGuesses(layer, Throttle(), None, capture=True, kv="plain")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Folder of a tiny checkpoint with a prediction layer, by its family."""
    return functools.cache(lambda model_type: save_mtp(tmp_path_factory.mktemp(model_type), model_type))


@pytest.fixture(scope="module")
def folder(folder_of: FolderOf) -> Path:
    return folder_of("deepseek_v3")


@pytest.mark.parametrize(("model_type", "eagle"), [("deepseek_v3", False), ("glm4_moe", False), ("glm4_moe", True)])
def test_guesses_are_those_of_the_paper(model_type: str, eagle: bool, folder_of: FolderOf, tmp_path: Path) -> None:
    """Of two sessions, with one to three positions each time, after cuts, and with an answer that began before."""
    folder = folder_of(model_type)
    head = save_eagle(tmp_path / "head", folder) if eagle else None
    paper = ByThePaper(folder) if head is None else ByTheEaglePaper(folder, head)
    span, guesses = spans(folder, head)
    runner = StageRunner(span, RunnerConfig(1 << 24))
    generator = torch.Generator().manual_seed(3)
    texts = {name: torch.randint(0, 90, (24,), generator=generator).tolist() for name in "ab"}
    begins, ends = {"a": 3, "b": 6}, {}
    for name, begin in begins.items():
        runner.open(name, rows=1, max_length=40)
        runner.run([StepInput(name, torch.tensor([texts[name][:begin]]))])
        ends[name] = begin
    for counts in ({"a": 1}, {"a": 2, "b": 3}, {"a": 1, "b": 1}, {"b": 2}, {"a": 3, "b": 1}):
        drawn = []
        for name, count in counts.items():
            start, ends[name] = ends[name], ends[name] + count
            (result,) = runner.run([StepInput(name, torch.tensor([texts[name][start : ends[name]]]), want=2)])
            assert result.left_BKH is not None and result.output.shape[-1] == span.vocab_size
            drawn.append(
                DrawnStates(name, start, result.left_BKH[0], tuple(texts[name][start + 1 : ends[name] + 1]), True)
            )
        found = guesses.guess(drawn)
        for name in counts:
            hidden_TH = paper.states(texts[name])[1][begins[name] : ends[name]]
            assert found[name] == paper.guesses(hidden_TH, texts[name][begins[name] + 1 : ends[name] + 1]), name


def test_an_answer_that_jumps_begins_anew(folder: Path) -> None:
    paper, (_, guesses) = ByThePaper(folder), spans(folder)
    text = torch.randint(0, 90, (12,), generator=torch.Generator().manual_seed(4)).tolist()
    left_TH, states = paper.states(text)
    guesses.guess([DrawnStates("a", 2, left_TH[2:4], tuple(text[3:5]), True)])
    (found,) = guesses.guess([DrawnStates("a", 8, left_TH[8:10], tuple(text[9:11]), True)]).values()
    assert found == paper.guesses(states[8:10], text[9:11])
    (again,) = guesses.guess([DrawnStates("a", 9, left_TH[9:10], tuple(text[10:11]), True)]).values()
    assert again == found, "cut back to a position that it has"


class Sure:
    """Layer of one width that enters nothing and guesses the same token behind every position."""

    def __init__(self, layer: Any) -> None:
        self.block = layer.block
        self._layer = layer

    def own_states(self, left_RTH: Tensor) -> Tensor:
        return self._layer.own_states(left_RTH)

    def enter(self, hidden_RTH: Tensor, ids_RT: Tensor) -> Tensor:
        return self._layer.enter(hidden_RTH, ids_RT)

    def guess(self, hidden_RH: Tensor) -> Tensor:
        return torch.full((len(hidden_RH),), 9)


def passes(guesses: MtpGuesses, token: int, *, heeded: bool, count: int = 40) -> list[int]:
    """Draw the same token again and again. Returns the passes behind which something was guessed."""
    width = guesses.layer.block.hidden_size
    left_TH = torch.randn(1, width, generator=torch.Generator().manual_seed(5))
    return [at for at in range(count) if guesses.guess([DrawnStates("a", 3 + at, left_TH, (token,), heeded)])]


def test_a_session_without_gain_rests_and_tries_again(folder: Path) -> None:
    _, guesses = spans(folder)
    guesses.layer = Sure(guesses.layer)  # type: ignore[assignment]
    assert passes(guesses, 9, heeded=True) == [*range(40)]
    guesses.close("a")
    wrong = passes(guesses, 8, heeded=True, count=RETRY + 1)
    assert wrong[-2:] == [RETRY - 1, RETRY] and len(wrong) < RETRY / 2 and wrong[:20] == [*range(20)]
    guesses.close("a")
    assert passes(guesses, 9, heeded=False) == [*range(PATIENCE)]


def test_a_long_answer_and_a_full_cache_are_no_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span, _ = spans(folder)
    layer, ledger = span.reader, MemoryLedger()
    assert isinstance(layer, MtpLayer)
    monkeypatch.setattr(mtp_guesses, "CONTEXT", 12)
    monkeypatch.setattr(mtp_guesses, "CACHE_POSITIONS", 60)
    guesses = MtpGuesses(layer, Throttle(), ledger, capture=False, kv="plain")
    left_TH = torch.randn(1, span.hidden_size, generator=torch.Generator().manual_seed(6))
    for position in range(24):
        assert len(guesses.guess([DrawnStates("a", position, left_TH, (4,), True)])["a"]) == GUESSES
    assert ledger.accounts()[Account.KV_CACHE] > 0
    others = guesses.guess([DrawnStates(name, 5, left_TH, (4,), True) for name in "abc"])
    assert set(others) < set("abc"), "a session finds no room, and does without"
    guesses.close_all()
    assert ledger.used_bytes == 0 and not guesses.fault


def test_an_error_of_the_layer_ends_its_guesses_alone(folder: Path) -> None:
    span, guesses = spans(folder)
    wrong_TH = torch.randn(1, span.hidden_size + 1)
    assert guesses.guess([DrawnStates("a", 0, wrong_TH, (4,), True)]) == {} and guesses.fault
    assert guesses.guess([DrawnStates("b", 0, wrong_TH[:, 1:], (4,), True)]) == {}


def test_only_a_whole_layer_in_a_known_form_is_used(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder)
    names = mtp_tensors(checkpoint)
    assert "shared_head.head.weight" not in names and mtp_bytes(checkpoint, torch.float32) > 0
    prefix = f"model.layers.{LAYERS}."
    del checkpoint.entries[f"{prefix}embed_tokens.weight"]
    assert mtp_tensors(checkpoint)["embed_tokens.weight"] == "model.embed_tokens.weight"
    span = load_span(checkpoint, LAYERS, LAYERS + 2, dtype=torch.float32, check=False)
    assert load_mtp(checkpoint, span).weight_bytes >= mtp_bytes(checkpoint, torch.float32)
    del checkpoint.entries[f"{prefix}hnorm.weight"]
    assert mtp_tensors(checkpoint) == {}
    with pytest.raises(CheckpointError, match="no prediction layer"):
        load_mtp(checkpoint, span)
    save_llama(tmp_path, layers=1)
    assert mtp_tensors(Checkpoint(tmp_path)) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d2t": torch.zeros(9)}, "an EAGLE-3 head reads the states of three layers"),
        ({"fc.weight": torch.zeros(8, 16)}, r"fc.weight has the shape \(8, 16\), not"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(8, 8)}, "and no known EAGLE head has that tensor"),
        ({"layers.0.mlp.up_proj.weight": None}, "this EAGLE head lacks layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_head_of_another_kind_is_refused(
    changes: dict[str, Tensor | None], reason: str, folder: Path, tmp_path: Path
) -> None:
    head = save_eagle(tmp_path / "head", folder)
    stored = {name: tensor for name, tensor in (load_file(head / WEIGHTS) | changes).items() if tensor is not None}
    save_file(stored, head / WEIGHTS)
    with pytest.raises(CheckpointError, match=reason):
        check_eagle(Checkpoint(head), Checkpoint(folder))
