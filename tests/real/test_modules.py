"""Modules of any kind on real nodes: the loss curve of one process, though a replica is killed on the way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from swarmnode.cli.main import app
from swarmnode.localswarm import START_TIMEOUT_S
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.numerics.graph_families import Batch, build
from tests.real.forked import ForkedSwarm
from tests.real.test_training import read_log, wait_for_step_of_four
from tests.tagger import save_data
from tests.training_results import assert_same_curve

STEPS, KILLED_AT = 24, 3


def t5() -> tuple[nn.Module, Batch]:
    return build("t5")


@pytest.mark.parametrize("spec", ["tests.tagger:tagger", f"{__name__}:t5"])
def test_a_module_trains_as_one_process_though_a_replica_is_killed(spec: str, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    save_data(data)
    settings = ("--data", str(data), "--steps", str(STEPS), "--batch", "8", "--microbatch", "2", "--lr", "1e-2")
    with ForkedSwarm(tmp_path) as local:
        asked = ["create", str(local.file.with_suffix("")), "--open", "--mode", "train", "--module", spec]
        environment = {**local.environment, "SWARMNODE_HOME": str(tmp_path / "client")}
        created = CliRunner().invoke(app, [*asked, "--units", "8", "--quiet"], env=environment)
        assert created.exit_code == 0, created.stderr
        local.bootstrap()
        manifest = load_swarm(local.file).manifest
        assert manifest is not None
        units = manifest.model.units
        spans = [f"{start}:{end}" for start, end in pairwise((0, units // 2, units))]
        nodes = [
            local.node(f"{place}-{replica}", "--span", span, "--compress", "none", "--memory", "200MB")
            for place, span in enumerate(spans)
            for replica in "ab"
        ]
        for node in nodes:
            node.wait_for("ready")
        trainer = local.trainer("trainer", "--log", str(tmp_path / "log.jsonl"), *settings)
        wait_for_step_of_four(trainer, KILLED_AT)
        nodes[0].kill()
        assert trainer.finish(START_TIMEOUT_S) == 0, trainer.tail()
        local.command("train", str(local.file), "--local", "--log", str(tmp_path / "alone.jsonl"), *settings)
        assert_same_curve(read_log(tmp_path / "log.jsonl"), read_log(tmp_path / "alone.jsonl"), steps=STEPS)
