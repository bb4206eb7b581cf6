"""create, train --local and export: what works leaves its files, what cannot is one clear line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cli.command import ROOT, assert_clear, invoke
from tests.gateway.speaking import save_speaking_llama

CONFIG = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, image, label):
        return nn.functional.cross_entropy(self.head(self.body(image).mean((2, 3))), label)


class Stubborn(Net):
    def forward(self, image, label):
        if image.sum() > 0:
            return super().forward(image, label)
        return super().forward(-image, label)


def net(kind=Net):
    torch.manual_seed(0)
    return kind(), {"image": torch.randn(4, 1, 8, 8), "label": torch.arange(4)}


def stubborn():
    return net(Stubborn)
"""


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a swarm `text.swarm` of a tiny GPT-2, `net.swarm` of a module, and data for both."""
    folder = tmp_path_factory.mktemp("school")
    config = write_config(folder / "config")
    (folder / "factory.py").write_text(FACTORY)
    for name, source in (("text", ("--config", str(config), "--seed", "3")), ("net", ("--module", "factory:net"))):
        done = invoke("create", name, "--mode", "train", *source, "--json", home=folder, cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.json").write_text(done.stdout)
    (folder / "data.txt").write_text("to be, or not to be: that is the question. " * 60)
    chance = np.random.default_rng(0)
    label = chance.integers(0, 4, 64)
    np.savez(folder / "data.npz", image=chance.normal(size=(4, 1, 8, 8))[label], label=label)
    return folder


def train(school: Path, swarm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoke("train", f"{swarm}.swarm", "--local", *arguments, home=school, cwd=school)


def losses(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(set(line) == {"step", "loss", "step_s", "expected_s", "tokens_per_s", "peers"} for line in lines)
    return [line["loss"] for line in lines]


def test_what_create_says_and_writes(school: Path) -> None:
    text, net = (json.loads((school / f"{name}.json").read_text()) for name in ("text", "net"))
    assert (text["kind"], text["mode"], text["units"]) == ("causal_lm", "train", 4)
    assert (net["kind"], net["mode"]) == ("graph", "train")
    assert net["units"] >= 1
    assert sorted(path.name for path in (school / "net-weights").iterdir()) == ["graph.json", "model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(school / "text-weights")
    assert model.num_parameters() == sum(
        tensor.numel() for tensor in load_file(school / "text-weights/model.safetensors").values()
    )
    assert net["bytes"] == sum(path.stat().st_size for path in (school / "net-weights").iterdir())


def test_a_language_model_learns_and_is_written(school: Path) -> None:
    arguments = ("--data", "data.txt", "--steps", "12", "--batch", "8", "--sequence", "32", "--lr", "1e-2")
    done = train(school, "text", *arguments, "--log", "text.jsonl", "--out", "trained")
    assert done.returncode == 0, done.stderr
    assert "step 12 of 12" in done.stdout
    curve = losses(school / "text.jsonl")
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 1
    before, after = (AutoModelForCausalLM.from_pretrained(school / name) for name in ("text-weights", "trained"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    again = train(school, "text", *arguments, "--json")
    assert [json.loads(line)["loss"] for line in again.stdout.splitlines()] == curve, "the same each time"
    assert_clear(train(school, "text", *arguments, "--out", "trained"), 2, "exists", "--force")


def test_a_module_learns_and_load_state_dict_reads_it(school: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "--steps",
        "12",
        "--batch",
        "16",
        "--microbatch",
        "8",
        "--lr",
        "1e-2",
        "--log",
        "net.jsonl",
        "--out",
        "net-trained",
    )
    done = train(school, "net", "--data", "data.npz", *arguments)
    assert done.returncode == 0, done.stderr
    curve = losses(school / "net.jsonl")
    assert curve[-1] < curve[0] - 0.2
    monkeypatch.syspath_prepend(str(school))
    module = __import__("factory").net()[0]
    module.load_state_dict(load_file(school / "net-trained" / "model.safetensors"))
    assert module.body[1].num_batches_tracked == 12


def test_a_loss_that_is_not_finite_ends_it_with_the_last_good_step(school: Path) -> None:
    arguments = ("--data", "data.txt", "--steps", "5", "--lr", "1e30", "--clip", "0", "--optimizer", "sgd")
    done = train(school, "text", *arguments, "--log", "bad.jsonl", "--out", "last-good")
    assert_clear(done, 1, "layer ", "step 1", "last good step is in", "last-good")
    assert len(losses(school / "bad.jsonl")) == 1
    assert (school / "last-good" / "config.json").is_file()


def test_ctrl_c_says_where_it_stands(school: Path) -> None:
    command = [sys.executable, "-m", "swarmnode.cli.main", "train", "text.swarm", "--local", "--data", "data.txt"]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--json", "--out", "stopped"],
        cwd=school,
        env={**os.environ, "SWARMNODE_HOME": str(school), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 0
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "of 100,000." in told.splitlines()[-1]
    assert (school / "stopped" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("data", "arguments", "exit_code", "words"),
    [
        ("none.txt", (), 2, ("no such file",)),
        ("empty.txt", (), 2, ("empty",)),
        ("binary.txt", (), 2, ("not text",)),
        ("short.txt", (), 2, ("less than one sample",)),
        ("data.txt", ("--sequence", "65"), 2, ("64 positions",)),
        ("data.txt", ("--batch", "8", "--microbatch", "3"), 2, ("multiple of the microbatch",)),
        ("data.txt", ("--optimizer", "adam"), 2, ("adamw, adamw8bit, sgd",)),
        ("data.txt", ("--optimizer", "schedule-free"), 2, ("a constant schedule",)),
        ("data.txt", ("--average-codec", "zip"), 2, ("none, bf16",)),
        ("data.txt", ("--log", "/no/such/log"), 1, ("cannot write the log",)),
        ("data.txt", ("--device", "cuda:77"), 1, ("no device",)),
    ],
)
def test_what_cannot_be_trained(
    school: Path, tmp_path: Path, data: str, arguments: tuple[str, ...], exit_code: int, words: tuple[str, ...]
) -> None:
    contents: Mapping[str, bytes] = {"empty.txt": b"", "binary.txt": bytes(range(256)), "short.txt": b"short"}
    path = school / data
    if data in contents:
        path = tmp_path / data
        path.write_bytes(contents[data])
    swarm = str(school / "text.swarm")
    done = invoke("train", swarm, "--local", "--data", str(path), "--steps", "3", "--home", str(tmp_path), *arguments)
    assert_clear(done, exit_code, *words)


def test_data_of_a_module_that_does_not_fit(school: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", picture=np.zeros((3, 8, 8)), label=np.zeros(3, dtype=int))
    done = invoke("train", str(school / "net.swarm"), "--local", "--data", str(tmp_path / "data.npz"), "--steps", "3")
    assert_clear(done, 2, "no array 'image'", "takes image, label")


def test_weights_that_were_changed_are_not_trained(school: Path, tmp_path: Path) -> None:
    arguments = ("--mode", "train", "--config", str(school / "config"), "--quiet")
    assert invoke("create", "mine", *arguments, home=tmp_path, cwd=tmp_path).returncode == 0
    config = tmp_path / "mine-weights" / "config.json"
    config.write_text(config.read_text() + " ")
    done = invoke(
        *("train", "mine.swarm", "--local", "--data", str(school / "data.txt"), "--steps", "1"),
        home=tmp_path,
        cwd=tmp_path,
    )
    assert_clear(done, 1, "changed")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--mode", "train"), 2, ("exactly one of",)),
        (("--mode", "train", "--config", "config", "--model", "config"), 2, ("exactly one of",)),
        (("--config", "config"), 2, ("--mode train",)),
        (("--mode", "study", "--model", "config"), 2, ("serve or train",)),
        (("--mode", "train", "--config", "config", "--units", "4"), 2, ("--module",)),
        (("--mode", "train", "--config", "nowhere"), 2, ("no config.json",)),
        (("--mode", "train", "--config", "narrow"), 2, ("at least 256", "has 100")),
        (("--mode", "train", "--config", "encoder"), 1, ("encoder-decoder",)),
        (("--mode", "train", "--module", "factory"), 2, ("package.module:function",)),
        (("--mode", "train", "--module", "factory:none"), 2, ("no function none",)),
        (
            ("--mode", "train", "--module", "factory:stubborn"),
            2,
            ("torch.Tensor.__bool__", "if image.sum() > 0", "line"),
        ),
        (("--mode", "train", "--module", "none.pt2"), 2, ("none.pt2",)),
    ],
)
def test_what_cannot_be_founded_leaves_nothing(
    school: Path, arguments: tuple[str, ...], exit_code: int, words: tuple[str, ...]
) -> None:
    for name, changes in (("narrow", {"vocab_size": 100}), ("encoder", {"model_type": "t5"})):
        if not (school / name).exists():
            write_config(school / name, **changes)
    done = invoke("create", "wrong", *arguments, cwd=school)
    assert_clear(done, exit_code, *words)
    assert not list(school.glob("*wrong*")), "nothing is left"


def test_swarms_that_serve_are_not_trained(school: Path, tmp_path: Path) -> None:
    model = ("--model", str(school / "text-weights"), "--quiet")
    assert invoke("create", "serving", *model, home=tmp_path, cwd=tmp_path).returncode == 0
    data = ("--data", str(school / "data.txt"), "--steps", "1")
    done = invoke("train", "serving.swarm", "--local", *data, home=tmp_path, cwd=tmp_path)
    assert_clear(done, 2, "serves its model", "--mode train")


def test_export_looks_before_it_leaps(school: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("precious")
    for arguments in (("letters",), ("letters", "--force")):
        done = invoke("export", str(school / "text.swarm"), *arguments, home=tmp_path, cwd=tmp_path)
        assert_clear(done, 2, "letters")
    assert (tmp_path / "letters" / "dear.txt").read_text() == "precious"
    done = invoke("export", str(school / "text.swarm"), "new", "--patience", "0.2", home=tmp_path, cwd=tmp_path)
    assert_clear(done, 1, "cannot be reached")
    assert not (tmp_path / "new").exists()


def test_a_trainer_whose_swarm_is_not_there(school: Path, tmp_path: Path) -> None:
    data = ("--data", str(school / "data.txt"), "--steps", "1")
    done = invoke("train", str(school / "text.swarm"), *data, "--patience", "0.2", home=tmp_path)
    assert_clear(done, 1, "cannot be reached")
    assert_clear(invoke("train", str(school / "text.swarm"), *data, "--out", "x", home=tmp_path), 2, "--local")


def test_evaluation_epochs_and_a_recipe_in_a_file(school: Path) -> None:
    """What a recipe prints is a recipe; options that are given override it; the log has the losses of held-out data."""
    printed = train(school, "text", "--print-recipe", "--epochs", "2", "--sequence", "32", "--freeze", "*wte*")
    assert printed.returncode == 0 and "epochs = 2.0" in printed.stdout and "frozen = true" in printed.stdout
    recipe = school / "recipe.toml"
    recipe.write_text(printed.stdout)
    again = train(school, "text", "--recipe", "recipe.toml", "--print-recipe")
    assert again.stdout == printed.stdout
    options = ("--recipe", "recipe.toml", "--schedule", "hf-cosine", "--lr", "1e-2", "--data", "data.txt")
    evaluates = ("--eval-share", "0.1", "--eval-every", "2", "--log", "held.jsonl", "--out", "held")
    done = train(school, "text", *options, *evaluates)
    assert done.returncode == 0, done.stderr
    assert "Data: 72 samples, 2,304 tokens; 2.22 epochs" in done.stdout and "held out " in done.stdout
    lines = [json.loads(line) for line in (school / "held.jsonl").read_text().splitlines()]
    held = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert sorted(held) == [0, 2, 4] and held[4] < held[0] and len(lines) == 5
    before, after = (AutoModelForCausalLM.from_pretrained(school / name) for name in ("text-weights", "held"))
    assert torch.equal(before.transformer.wte.weight, after.transformer.wte.weight), "frozen"
    assert not torch.equal(before.transformer.wpe.weight, after.transformer.wpe.weight)
    stopped = train(school, "text", *options, *evaluates[:4], "--eval-patience", "1", "--lr", "0")
    assert stopped.returncode == 0 and "Stopped early after 3 steps: the held-out loss was lowest" in stopped.stdout


def test_a_training_in_this_process_goes_on_with_its_optimiser(school: Path) -> None:
    options = ("--data", "data.txt", "--steps", "6", "--batch", "8", "--sequence", "32", "--lr", "1e-2")
    whole = [json.loads(line) for line in train(school, "text", *options, "--json").stdout.splitlines()]
    short = train(school, "text", *options, "--json", "--state", "kept", "--checkpoint-steps", "3")
    assert [json.loads(line)["loss"] for line in short.stdout.splitlines()] == [line["loss"] for line in whole]
    again = train(school, "text", *options, "--state", "kept", "--checkpoint-steps", "3")
    assert again.returncode == 0 and "Nothing to do: all 6 steps of this run are done" in again.stdout
    assert_clear(train(school, "text", *options, "--state", "kept"), 2, "other settings or data")
    assert_clear(train(school, "text", *options, "--state", "config"), 2, "holds no state of a training")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "Give either --steps or --epochs"),
        (("--steps", "3", "--epochs", "1"), "Give either --steps or --epochs"),
        (("--steps", "3", "--eval-every", "2"), "--eval-share"),
        (("--steps", "3", "--eval-patience", "2"), "--eval-patience needs --eval-every"),
        (("--steps", "3", "--schedule", "zigzag"), "a schedule out of"),
        (("--steps", "3", "--freeze", "[a]"), "without brackets"),
        (("--steps", "3", "--label-smoothing", "2"), "the recipe is not valid"),
        (("--steps", "3", "--recipe", "none.toml"), "no such file"),
        (("--steps", "3", "--recipe", "strange.toml"), "a recipe has no key colour"),
        (("--steps", "3", "--recipe", "typed.toml"), "the recipe's lr is 'fast'"),
        (("--steps", "3", "--recipe", "group.toml"), "it has no key rate"),
    ],
)
def test_a_recipe_that_is_not_one_is_refused(school: Path, options: tuple[str, ...], told: str) -> None:
    (school / "strange.toml").write_text('colour = "red"')
    (school / "typed.toml").write_text('lr = "fast"')
    (school / "group.toml").write_text('[[groups]]\nmatch = "*"\nrate = 3')
    assert_clear(train(school, "text", "--data", "data.txt", *options), 2, told)


ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(("command", "mode"), [("train", "train"), ("tune", "serve")])
def test_a_template_that_closes_by_the_next_role_teaches_no_end_unless_it_is_asked_for(
    tmp_path: Path, command: str, mode: str
) -> None:
    save_speaking_llama(tmp_path / "model", chat_template=ROLES)
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "<|end|>"}))
    talk = [{"role": "user", "content": "How are the hens?"}, {"role": "assistant", "content": "They are well."}]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps({"messages": talk * 2}) for _ in range(8)))
    done = invoke("create", "talk", "--model", str(tmp_path / "model"), "--mode", mode, home=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = ("talk.swarm", "--local", "--data", "talk.jsonl", "--steps", "2", "--batch", "4", "--sequence", "256")
    untold = invoke(command, *asked, "--out", "without", home=tmp_path, cwd=tmp_path)
    assert untold.returncode == 0, untold.stderr
    assert "No label teaches the model to stop" in untold.stdout and "its stop token ('<|end|>')" in untold.stdout
    told = invoke(command, *asked, "--end-answers", "--out", "with", home=tmp_path, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "No label" not in told.stdout
    assert "⟦They are well.\\n<|end|>⟧" in told.stdout, "the last answer alone: the next role closes the others"
    files = ["model.safetensors" if command == "train" else "adapter_model.safetensors"] * 2
    without, taught = (load_file(tmp_path / out / name) for out, name in zip(("without", "with"), files, strict=True))
    assert any(not torch.equal(without[name], taught[name]) for name in without)


def test_a_model_with_a_bottleneck_trains_here_and_is_not_exported(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config", n_layer=3)
    (tmp_path / "data.txt").write_text("to be, or not to be: that is the question. " * 60)

    def create(*options: str) -> subprocess.CompletedProcess[str]:
        return invoke("create", "thin", "--mode", "train", *options, "--json", home=tmp_path, cwd=tmp_path)

    for options, word in (
        (("--config", str(config), "--bottleneck", "0"), "choose 1 to 32"),
        (("--config", str(config), "--bottleneck", "33"), "choose 1 to 32"),
        (("--config", str(config), "--bottleneck", "8", "--stage-layers", "3"), "choose 1 to 2"),
        (("--config", str(config), "--stage-layers", "1"), "need --bottleneck"),
        (("--config", str(config), "--anchor", "0"), "need --bottleneck"),
        (("--config", str(config), "--bottleneck", "8", "--anchor", "33"), "choose 0 to 32"),
        (("--module", "factory:net", "--bottleneck", "8"), "needs a language model"),
        (("--model", str(config), "--bottleneck", "8"), "--sample FILE"),
        (("--config", str(config), "--bottleneck", "8", "--sample", "data.txt"), "--sample FILE"),
    ):
        assert_clear(create(*options), 2, word)
        assert not (tmp_path / "thin.swarm").exists()
    done = create("--config", str(config), "--bottleneck", "8")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["units"], told["bottleneck"], told["anchor"]) == (3, 8, 32)
    settings = ("thin.swarm", "--data", "data.txt", "--steps", "2", "--batch", "2", "--sequence", "16")
    trained = invoke("train", *settings, "--local", "--json", home=tmp_path, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    refused = invoke("train", *settings, "--local", "--out", "out", home=tmp_path, cwd=tmp_path)
    assert_clear(refused, 2, "no class of transformers")
