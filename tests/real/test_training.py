"""The test of truth with real processes and the commands that users type: the loss curve of one process.

Who is lost when, and what comes of it, is varied in tests/node, in virtual time.
"""

from __future__ import annotations

import json
import shutil
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarmnode.localswarm import LocalSwarm, NodeProcess
from tests.training_results import assert_same_curve, assert_same_parameters

DATA = Path(typing.__file__)
SPANS = ("0:2", "2:4", "4:6")
STEPS = 50
KILLED_AT = 8
CHECKPOINT_STEPS = 10
TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 120.0
SETTINGS = (
    "--data", str(DATA), "--steps", str(STEPS), "--batch", "48", "--microbatch", "4", "--sequence", "32",
    "--lr", "1e-3", "--warmup", "5", "--checkpoint-steps", str(CHECKPOINT_STEPS), "--seed", "7",
)  # fmt: skip


def read_lines(path: Path) -> list[dict[str, typing.Any]]:
    """What a trainer logged, step by step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_log(path: Path) -> dict[int, float]:
    """Losses by step."""
    return {line["step"]: line["loss"] for line in read_lines(path)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of four layers on bytes, with dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=256, n_embd=64, n_layer=4, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def founded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .swarm file; each test has a swarm of its own by it."""
    local = LocalSwarm(tmp_path_factory.mktemp("founded"))
    local.create(model, "--mode", "train")
    return local.file


@pytest.fixture(scope="module")
def alone(founded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a single process on the same batches."""
    folder = tmp_path_factory.mktemp("alone")
    local = LocalSwarm(folder)
    shutil.copy2(founded, local.file)
    local.command("train", str(local.file), "--local", "--log", str(folder / "log"), *SETTINGS, timeout_s=TIMEOUT_S)
    return read_log(folder / "log")


@dataclass
class School:
    """A swarm that trains, and its nodes by name."""

    local: LocalSwarm
    nodes: dict[str, NodeProcess]

    def start(self, name: str, span: str, *extra: str) -> NodeProcess:
        self.nodes[name] = self.local.node(name, "--span", span, *(extra or ("--compress", "none")))
        return self.nodes[name]

    def train(self, name: str, *extra: str) -> NodeProcess:
        return self.local.trainer(name, "--log", str(self.log(name)), *SETTINGS, *extra)

    def log(self, name: str) -> Path:
        return self.local.folder / f"{name}.jsonl"

    def settle(self, names: Sequence[str]) -> None:
        """Wait until each of these nodes has the last step on its disk, those that came late too."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while not all(self._last_step(name) for name in names):
            assert time.monotonic() < deadline_s, [name for name in names if not self._last_step(name)]
            time.sleep(0.1)

    def _last_step(self, name: str) -> list[Path]:
        return sorted((self.local.folder / "homes" / name).glob(f"training/*/*/step-{STEPS:08d}"))

    def stop(self, names: Sequence[str]) -> None:
        """In order, so that each node writes down where it is."""
        for name in names:
            self.nodes[name].stop()

    def last_states(self, name: str) -> dict[str, Path]:
        """The files of the last step on a node's disk, by block."""
        return {path.name: path for path in self._last_step(name)[-1].glob("*.safetensors")}


@pytest.fixture
def school(founded: Path, tmp_path: Path) -> Iterator[School]:
    with LocalSwarm(tmp_path) as local:
        shutil.copy2(founded, local.file)
        local.bootstrap()
        yield School(local, {})


def wait_for_step(trainer: NodeProcess, step: int) -> None:
    trainer.wait_until(lambda line: line.get("step", -1) >= step, f"step {step}", TIMEOUT_S)


def test_the_curve_of_one_process_though_a_replica_is_killed(school: School, alone: dict[int, float]) -> None:
    """One of each pair is killed on the way, and another one comes. Who comes too late to take part still takes over the state,
    so that its parameters are compared too."""
    for span in SPANS:
        for replica in ("a", "b"):
            school.start(f"{span}-{replica}", span)
    for node in school.nodes.values():
        node.wait_for("ready")
    trainer = school.train("trainer")
    wait_for_step(trainer, KILLED_AT)
    school.nodes.pop(f"{SPANS[1]}-a").kill()
    school.start(f"{SPANS[1]}-c", SPANS[1]).wait_for("ready")
    assert trainer.finish(TIMEOUT_S) == 0
    assert_same_curve(read_log(school.log("trainer")), alone, steps=STEPS)
    assert alone[STEPS - 1] < 0.75 * alone[0]
    assert min(line["peers"] for line in read_lines(school.log("trainer"))) < len(school.nodes), "a replica was lost"
    survivors = list(school.nodes)
    school.settle(survivors)
    school.stop(survivors)
    assert_same_parameters(school, survivors, spans=len(SPANS))


def test_a_slow_uplink_is_compressed_for_and_says_so(school: School, alone: dict[int, float]) -> None:
    """Paced to 1 Mbit/s, so that hidden states of 33 kB would be slower than computing them; the curve stays close."""
    for span in SPANS:
        school.start(span, span, "--max-upload", "1Mbit").wait_for("ready")
    settings = ("--microbatch", "16", "--steps", "12")
    trainer = school.local.trainer("trainer", "--log", str(school.log("trainer")), *SETTINGS, *settings)
    told = school.nodes[SPANS[0]].wait_for("compressing", TIMEOUT_S)
    assert told["direction"] == "forward"
    assert told["codec"] in ("bf16", "int8", "int4")
    assert "Mbit/s" in told["reason"]
    assert trainer.finish(TIMEOUT_S) == 0
    log = read_log(school.log("trainer"))
    assert log[0] == pytest.approx(alone[0], rel=1e-3)
    assert log[11] < 0.95 * log[0]


def test_a_trained_swarm_serves_and_is_exported(school: School, tmp_path: Path) -> None:
    """Greedy bytes of the swarm are those of transformers with the exported model."""
    from swarmnode.demo.lesson import generate_alone

    for span in SPANS:
        school.start(span, span, "--memory", "200MB").wait_for("ready")
    assert school.train("trainer", "--steps", "12").finish(TIMEOUT_S) == 0
    prompt = "def f(x"
    generated = json.loads(
        school.local.command("generate", str(school.local.file), prompt, "--max-new-tokens", "12", "--json")
    )
    school.local.command("export", str(school.local.file), str(tmp_path / "out"))
    assert generated["ids"] == generate_alone(tmp_path / "out", list(prompt.encode()), 12)
