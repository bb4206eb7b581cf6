"""The test of truth with real processes and the commands that users type: the loss curve of one process, and what comes of it.

Who is lost when, and what comes of it, is varied in tests/node, in virtual time.
"""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swarmnode.demo import generate_alone
from swarmnode.localswarm import START_TIMEOUT_S, NodeProcess
from tests.real.forked import ForkedSwarm
from tests.training_results import assert_same_curve, assert_same_parameters

DATA = Path(typing.__file__)
SPANS = ("0:3", "3:6")
STEPS = 30
KILLED_AT = 6
PROMPT, NEW = "def f(x", 12
SETTINGS = (
    "--data", str(DATA), "--steps", str(STEPS), "--batch", "32", "--microbatch", "8", "--sequence", "32",
    "--lr", "1e-3", "--warmup", "5", "--checkpoint-steps", "10", "--seed", "7",
)  # fmt: skip


def read_lines(path: Path) -> list[dict[str, typing.Any]]:
    """What a trainer logged, step by step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_log(path: Path) -> dict[int, float]:
    """Losses by step."""
    return {line["step"]: line["loss"] for line in read_lines(path)}


def wait_for_step_of_four(trainer: NodeProcess, step: int) -> None:
    """Wait for a step, from `step` on, of all four nodes: before it, one of them may be the only holder of its layers' state."""
    trainer.wait_until(lambda line: line.get("step", -1) >= step and line.get("peers") == 4, f"step {step} of four")


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


@dataclass
class School:
    """A swarm that trains, and its nodes by name."""

    local: ForkedSwarm
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    def start(self, name: str, span: str) -> NodeProcess:
        self.nodes[name] = self.local.node(name, "--span", span, "--compress", "none", "--memory", "200MB")
        return self.nodes[name]

    def log(self, name: str) -> Path:
        return self.local.folder / f"{name}.jsonl"

    def alone(self) -> dict[int, float]:
        """The losses of a single process on the same batches."""
        log = self.log("alone")
        self.local.command("train", str(self.local.file), "--local", "--log", str(log), *SETTINGS)
        return read_log(log)

    def settle(self) -> None:
        """Wait until each of the nodes has the last step on its disk, those that came late too."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not all(map(self._last_step, self.nodes)):
            assert time.monotonic() < deadline_s, [name for name in self.nodes if not self._last_step(name)]
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
def school(model: Path, tmp_path: Path) -> Iterator[School]:
    with ForkedSwarm(tmp_path) as local:
        local.create(model, "--mode", "train")
        local.bootstrap()
        yield School(local)


def test_a_swarm_trains_as_one_process_though_a_replica_is_killed_serves_and_is_exported(school: School) -> None:
    """One of a pair is killed on the way, and another one comes. Who comes too late to take part still takes over the state,
    so that its parameters are compared too. Greedy bytes of the swarm are those of transformers with the exported model."""
    local = school.local
    for span in SPANS:
        for replica in ("a", "b"):
            school.start(f"{span}-{replica}", span)
    for node in school.nodes.values():
        node.wait_for("ready")
    trainer = local.trainer("trainer", "--log", str(school.log("trainer")), *SETTINGS)
    wait_for_step_of_four(trainer, KILLED_AT)
    school.nodes.pop(f"{SPANS[0]}-a").kill()
    school.start(f"{SPANS[0]}-c", SPANS[0]).wait_for("ready")
    assert trainer.finish(START_TIMEOUT_S) == 0, trainer.tail()
    school.settle()

    asked = (str(local.file), PROMPT, "--max-new-tokens", str(NEW), "--json")
    generated = json.loads(local.command("generate", *asked))["ids"]
    local.command("export", str(local.file), str(local.folder / "out"))
    school.stop(list(school.nodes))
    assert generated == generate_alone(local.folder / "out", list(PROMPT.encode()), NEW)

    alone = school.alone()
    assert alone[STEPS - 1] < 0.75 * alone[0]
    assert_same_curve(read_log(school.log("trainer")), alone, steps=STEPS)
    assert min(line["peers"] for line in read_lines(school.log("trainer"))) < len(school.nodes), "a replica was lost"
    assert_same_parameters(school, list(school.nodes), spans=len(SPANS))

    for span in SPANS:
        school.start(f"{span}-b", span).wait_for("ready")
    assert json.loads(local.command("generate", *asked))["ids"] == generated
