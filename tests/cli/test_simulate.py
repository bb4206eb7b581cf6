import json
import os
from pathlib import Path

import pytest

from tests.cli.command import assert_clear, invoke, swarmnode

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A scenario of three devices of given speeds, and a tiny model's config."""
    matrix = [[0 if i == j else 5 for j in range(3)] for i in range(3)]
    network = {
        "name": "three",
        "devices": 3,
        "delay_ms": matrix,
        "bandwidth_gbps": [[0.1] * 3] * 3,
        "memory_gb": [1, 1, 1],
        "decode_units_per_s": [100, 200, 300],
    }
    scenario, config = tmp_path / "three.json", tmp_path / "config.json"
    scenario.write_text(json.dumps(network))
    config.write_text(json.dumps(TINY))
    return str(scenario), str(config)


def simulate(files, *options):
    return invoke("plan", "simulate", files[0], "--model", files[1], "--hours", "0.02", *options)


def test_json_tells_what_was_simulated(files):
    done = simulate(files, "--json", "--churn", "200%", "--seed", "3")
    figures = json.loads(done.stdout)
    assert done.returncode == 0
    assert figures["scenario"] == "three" and figures["peers"] == 3 and figures["seed"] == 3
    assert figures["churn_per_hour"] == 2.0
    assert figures["tokens_per_s"] > 0 and figures["totals"]["tokens"] > 0


def test_a_table_and_a_page_for_people(files, tmp_path):
    page = tmp_path / "out.html"
    done = simulate(files, "--report", str(page))
    assert done.returncode == 0 and "tokens per second" in done.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_training(files):
    figures = json.loads(simulate(files, "--workload", "train", "--microbatches", "4", "--json").stdout)
    assert figures["totals"]["steps"] > 0


def test_groups_for_a_mixtures_experts_are_compared(files):
    config = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert "expert_groups" not in json.loads(simulate(files, "--json").stdout)
    Path(files[1]).write_text(json.dumps(config))
    kinds = {
        "serve": ["prompts of 512 tokens (1 at once)", "decoding (1 at once)"],
        "train": ["training (4 microbatches of 1,024 tokens)"],
    }
    for workload, works in kinds.items():
        done = simulate(files, "--workload", workload, "--microbatches", "4", "--json")
        groups = json.loads(done.stdout)["expert_groups"]
        assert [group["work"] for group in groups] == works
        assert all(" machines at 0.1 Gbit/s: " in group["says"] for group in groups)
    assert groups[0]["says"] in " ".join(simulate(files, "--workload", "train", "--microbatches", "4").stdout.split())


def test_a_trace(files, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text('[[10, 0, "down"], [30, 0, "up"]]')
    figures = json.loads(simulate(files, "--churn", str(trace), "--json").stdout)
    assert figures["totals"]["peers lost"] == 1


def test_the_same_seed_gives_the_same_bits_in_another_process(files, tmp_path, monkeypatch):
    """Whatever order a process's sets have."""
    monkeypatch.setenv("PYTHONHASHSEED", "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    command = ("plan", "simulate", files[0], "--model", files[1], "--hours", "0.03", "--churn", "20", "--json")
    here, there = (json.loads(done.stdout) for done in (invoke(*command), swarmnode(*command, home=tmp_path)))
    for figures in (here, there):
        del figures["decisions"]  # this machine's own times
    assert json.dumps(here) == json.dumps(there)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "dance"], ["serve or train"]),
        (["--churn", "often"], ["10%"]),
        (["--churn", "-5%"], ["from 0 to 100"]),
        (["--gpu", "abacus"], ["RTX 3090"]),
        (["--report", "/no/such/folder/a.html"], ["no such folder"]),
        (["--workload", "train", "--compress", "zip"], ["int8"]),
        (["--average-codec", "zip"], ["int8"]),
    ],
)
def test_wrong_options(files, options, words):
    assert_clear(simulate(files, *options), 2, *words)


def test_a_missing_model_or_scenario(files, tmp_path):
    assert_clear(invoke("plan", "simulate", files[0], "--model", str(tmp_path / "none")), 2, "no such file")
    assert_clear(invoke("plan", "simulate", str(tmp_path / "none.json"), "--model", files[1]), 2, "none.json")


def plan_file(folder, **changes):
    stages = [{"units": [0, 3], "devices": [2]}, {"units": [3, 6], "devices": [0, 1]}]
    path = folder / "plan.json"
    path.write_text(json.dumps({"stages": stages, "pipelines": [[2, 0]], **changes}))
    return str(path)


def test_a_plan_is_carried_out(files, tmp_path):
    page = tmp_path / "out.html"
    options = (
        "--workload",
        "train",
        "--microbatches",
        "4",
        "--batch",
        "2",
        "--average-rank",
        "2",
        "--report",
        str(page),
    )
    done = simulate(files, "--plan", plan_file(tmp_path), *options)
    assert done.returncode == 0 and "tokens trained" in done.stdout
    assert "layers 0 to 2" in page.read_text() and "layers 3 to 5" in page.read_text()


def test_who_is_left_out_of_a_plan_stands_by_until_somebody_is_lost(files, tmp_path):
    two = plan_file(
        tmp_path, stages=[{"units": [0, 3], "devices": [2]}, {"units": [3, 6], "devices": [1]}], pipelines=[[2, 1]]
    )
    train = ("--workload", "train", "--microbatches", "4", "--plan", two)
    done = simulate(files, *train)
    assert "1 of 3 devices are not in the plan: they stand by until one in it is lost." in " ".join(done.stdout.split())
    calm = json.loads(simulate(files, *train, "--json").stdout)
    assert calm["standing_by"] == [0]
    trace = tmp_path / "trace.json"
    trace.write_text('[[10, 1, "down"]]')
    lost = json.loads(simulate(files, *train, "--churn", str(trace), "--json").stdout)
    assert calm["curves"]["stages"][-1] == lost["curves"]["stages"][-1] == 2, "it has taken the place of the lost one"
    whole = json.loads(simulate(files, "--workload", "train", "--plan", plan_file(tmp_path), "--json").stdout)
    assert whole["standing_by"] == []


def test_plans_for_something_else_are_refused(files, tmp_path):
    train = ("--workload", "train")
    assert_clear(simulate(files, "--plan", plan_file(tmp_path)), 2, "--plan works only for training")
    long = plan_file(tmp_path, stages=[{"units": [0, 9], "devices": [0]}])
    assert_clear(simulate(files, "--plan", long, *train), 2, "for 9 layers, and the model has 6")
    wide = plan_file(tmp_path, stages=[{"units": [0, 6], "devices": [7]}])
    assert_clear(simulate(files, "--plan", wide, *train), 2, "names device 7")
    assert_clear(simulate(files, "--plan", files[0], *train), 2, "not a plan")
