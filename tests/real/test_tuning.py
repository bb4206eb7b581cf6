"""A tuning as people run it: the command, and real nodes. After a node is killed, the losses are still those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.speaking import save_speaking_llama
from tests.real.forked import ForkedSwarm

SPANS = {"a": "0:2", "b": "2:4", "c": "2:4"}
STEPS = 16  # so many that the node is killed before they have passed


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_a_killed_node_changes_no_loss_and_peft_s_folder_comes_out(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_speaking_llama(model)
    data.write_text(
        "\n".join(json.dumps({"prompt": f"Say {word}.", "completion": word}) for word in ["one", "two", "three"])
    )
    size = ["--steps", str(STEPS), "--batch", "2", "--microbatch", "1", "--sequence", "16", "--rank", "2"]
    with ForkedSwarm(tmp_path) as local:
        local.create(model)
        local.bootstrap()
        nodes = {name: local.node(name, "--span", span, "--tune-share", "50%") for name, span in SPANS.items()}
        for node in nodes.values():
            node.wait_for("ready")
        given = [str(local.file), "--data", str(data), *size, "--json", "--checkpoint-steps", "2"]
        out = tmp_path / "out"
        tuning = local.start("owner", ["tune", *given, "--out", str(out), "--log", str(tmp_path / "log")])
        tuning.wait_until(lambda told: told.get("step") == 2, "step 2")
        last = "b" if "b holds" in tuning.tail() else "c"
        nodes[last].kill()
        assert tuning.finish(120.0) == 0, tuning.tail()
        assert f"Done: {STEPS} steps" in tuning.tail() and "computed again" in tuning.tail()
        assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        local.command("tune", *given, "--local", "--out", str(tmp_path / "alone"), "--log", str(tmp_path / "alone.log"))
    assert losses(tmp_path / "log") == pytest.approx(losses(tmp_path / "alone.log"), rel=1e-4)
