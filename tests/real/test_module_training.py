"""Any torch module, trained by real processes: skips over stages, batch norms, two replicas, the curve of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.localswarm import LocalSwarm
from tests.real.vision import classifier, write_images

STEPS = 30
TIMEOUT_S = 120.0


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_a_module_with_skips_and_batch_norms(tmp_path: Path) -> None:
    write_images(tmp_path / "images.npz")
    settings = (
        "--data", str(tmp_path / "images.npz"), "--steps", str(STEPS), "--batch", "32", "--microbatch", "8",
        "--lr", "1e-2", "--checkpoint-steps", "10",
    )  # fmt: skip
    with LocalSwarm(tmp_path / "swarm") as local:
        local.folder.mkdir()
        arguments = ("create", str(local.file.with_suffix("")), "--mode", "train", "--units", "4")
        local.command(*arguments, "--module", "tests.real.vision:classifier")
        status = json.loads((tmp_path / "swarm" / "local-weights" / "graph.json").read_text())
        units = len(status["cuts"]) + 1
        assert units >= 2
        half = units // 2
        local.bootstrap()
        for number, span in enumerate((f"0:{half}", f"{half}:{units}") * 2):
            local.node(f"node-{number}", "--span", span, "--compress", "none")
        for member in local.members[1:]:
            member.wait_for("ready")
        trainer = local.trainer("trainer", "--log", str(tmp_path / "swarm.jsonl"), *settings)
        assert trainer.finish(TIMEOUT_S) == 0, trainer.tail()
        local.command("export", str(local.file), str(tmp_path / "out"))
        local.command("train", str(local.file), "--local", "--log", str(tmp_path / "alone.jsonl"), *settings)
    alone = losses(tmp_path / "alone.jsonl")
    assert losses(tmp_path / "swarm.jsonl") == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < 0.8 * alone[0]
    from safetensors.torch import load_file

    module, _ = classifier()
    module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert int(module.get_buffer("enter.1.num_batches_tracked")) > 0
