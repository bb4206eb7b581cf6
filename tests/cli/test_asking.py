"""`swarmnode doctor`, `swarmnode fit`, `swarmnode fit --measure` and `swarmnode why`."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmnode import examination
from swarmnode.cli.plan.fit import _cards, _read_bytes, _rows
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.compute import stopwatch
from swarmnode.compute.capacity.capacity import KNOWN_MODELS, LLAMA_8B, unit_sizes
from swarmnode.compute.capacity.expert_tiers import expert_tier
from swarmnode.compute.device import Device
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.packing import ggml
from swarmnode.compute.packing.ggml import library
from swarmnode.config import StageConfig, parse_bytes
from swarmnode.examination import judge_bandwidth, judge_versions, judge_weights
from swarmnode.founding.model_source import from_checkpoint
from swarmnode.links.link_config import PeerVersions
from swarmnode.measuring.bandwidth import Bandwidth
from swarmnode.measuring.hardware import MEMORY_SHARE, Hardware, packed_advice
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.plan.cost import fit
from swarmnode.swarm.records.manifest import PACKED_FORMAT, Manifest, ModelInfo
from swarmnode.swarm.storage.content import PACKED_NAME, FileContent
from swarmnode.version import install_command
from tests.cli.command import assert_clear, invoke
from tests.compute.capacity.test_expert_tiers import EXPERT_BYTES, EXPERTS, LAYERS, UNITS, large_mixture
from tests.compute.model.llama_gguf import lose_ggml, save_llama_gguf
from tests.encoders import save_encoder
from tests.llama import save_llama
from tests.swarm.storage.test_joined_swarms import FRIENDS


def test_a_machine_is_examined_and_left_as_it_was(tmp_path: Path) -> None:
    done = invoke("doctor", "--json", home=tmp_path / "home")
    findings = {one["what"]: one for one in json.loads(done.stdout)}
    assert {"python", "device", "memory", "disk", "home", "network program"} <= findings.keys()
    assert all(one["verdict"] == "good" or one["remedy"] for one in findings.values())
    assert done.returncode == int(any(one["verdict"] == "bad" for one in findings.values()))
    assert not list(tmp_path.iterdir())


def test_what_is_bad_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "TRY_S", 0.2)
    monkeypatch.setattr(examination, "nvidia_cards", lambda: (None, ["a card"]))
    done = invoke("doctor", FRIENDS, home=tmp_path)
    assert done.returncode == 1 and "way in: " in done.stdout and "-> " in done.stdout


def test_findings_fit_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of 80 columns is full, but for words that are longer."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(examination, "TRY_S", 0.2)
    lines = invoke("doctor", FRIENDS, home=tmp_path).stdout.splitlines()
    assert all(len(line) <= 80 or len(line.split()[-1]) > 60 for line in lines)
    assert {line[:5] for line in lines} <= {"ok   ", "?    ", "BAD  ", "     "}


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--bandwidth"], "name it"), ([FRIENDS, "--bandwidth"], "--yes"), (["nobody"], "nobody")]
)
def test_the_doctor_asks_before_it_sends(arguments: list[str], words: str, tmp_path: Path) -> None:
    assert_clear(invoke("doctor", *arguments, home=tmp_path), 2, words)


def test_the_doctor_counts_packed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", 0, "CPU", 20 << 30, 15 << 30, shared=True)
    monkeypatch.setattr(examination, "probe_device", lambda _: cpu)
    small = FileContent(PACKED_NAME, 20, bytes(32))
    packed = Manifest(
        "big", ModelInfo("llama", 50, 64), (small, FileContent("weights.gguf", 20 << 30, bytes(32))), 1, PACKED_FORMAT
    )
    with monkeypatch.context() as without:
        lose_ggml(without)
        (finding,) = judge_weights(packed)
    assert finding.verdict == "doubtful" and "21.5 GB are packed" in finding.seen
    assert finding.remedy.startswith(
        "This model would run 3 times faster and take less memory with xllamacpp. Install: "
    )
    monkeypatch.setattr(ggml, "library", lambda: object())
    (finding,) = judge_weights(packed)
    assert finding.seen.startswith("12.9 GB hold about 28 of 50 layers, packed, multiplied by ggml of xllamacpp ")
    assert finding.verdict == "good"
    assert judge_weights(msgspec.structs.replace(packed, files=packed.files[1:])) == []


@pytest.mark.parametrize("free_gb", [2, 12, 28, 60])
def test_the_doctor_counts_experts_in_memory(monkeypatch: pytest.MonkeyPatch, free_gb: int) -> None:
    """As `fit` does; nothing is said of experts if all layers fit, or if not even the experts of one token do."""
    cpu = Device("cpu", 0, "CPU", 64 << 30, free_gb * 10**9, shared=True)
    monkeypatch.setattr(examination, "probe_device", lambda _: cpu)
    monkeypatch.setattr(ggml, "library", lambda: object())
    outline = large_mixture()
    sizes = unit_sizes(outline, dtype=torch.float32, keeps_packed=True)
    files = (FileContent(PACKED_NAME, 20, bytes(32)), FileContent("weights.gguf", sum(sizes.weight_bytes), bytes(32)))
    manifest = Manifest("big", ModelInfo("qwen3_moe", UNITS, 64), files, 1, PACKED_FORMAT)
    (finding,) = judge_weights(manifest, outline)
    room_bytes = int(cpu.free_bytes * MEMORY_SHARE)
    found = expert_tier(outline, sizes, room_bytes, 4096, UNITS)
    told = re.search(r"or all of them with experts on the disk \((.*)\)", finding.seen)
    assert (told is not None) == (free_gb in (12, 28)), finding.seen
    if told is not None:
        assert found is not None and told[1] == str(found[0])
        slots = int(re.findall(r"memory for (\d+) of 32 experts", told[1])[0])
        held_bytes = sum(sizes.weight_bytes) - LAYERS * (EXPERTS - slots) * EXPERT_BYTES
        assert held_bytes <= room_bytes < held_bytes + 4 * LAYERS * EXPERT_BYTES, "up to readers' buffers and caches"


def test_findings_about_a_swarm() -> None:
    met = PeerVersions()
    assert "machines" not in judge_versions(met).seen
    for name in "ab":
        met.greeted(Claimant(name, name), Hello(VERSION, bytes(32), newest=VERSION + 1))
    assert judge_versions(met).verdict == "doubtful" and "upgrade" in judge_versions(met).remedy
    assert [one.verdict for one in judge_bandwidth(Bandwidth(20e6, 100e6, 2))] == ["good"]
    assert judge_bandwidth(Bandwidth(20e6, 3380e6, 2))[0].seen == "20 Mbit/s up, 3,400 down, with 2 machines"
    for poor in (Bandwidth(1e6, 100e6, 1), Bandwidth(0, 0, 0)):
        assert judge_bandwidth(poor)[0].verdict == "doubtful" and judge_bandwidth(poor)[0].remedy


def test_what_fits_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    save_llama(tmp_path, 6, vocab_size=64, hidden_size=64, intermediate_size=512)
    done = invoke("fit", str(tmp_path), "--json", "--memory", "70MB", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    by_precision = {row["precision"]: row for row in json.loads(done.stdout)}
    assert by_precision["float32"]["units"] == 8 and by_precision["float32"]["bytes"] > by_precision["nf4"]["bytes"]
    assert 0 < by_precision["float32"]["fitting"] < 8 and by_precision["float32"]["machines"] > 1
    assert by_precision["nf4"]["fitting"] >= by_precision["float32"]["fitting"]
    rows = json.loads(invoke("fit", str(tmp_path), "--train", "--json", "--memory", "1GB", "--device", "cpu").stdout)
    taken = {row["precision"].split(",")[0]: row["bytes"] for row in rows}
    parameters = by_precision["float32"]["bytes"] // 4
    assert taken["adamw"] == 16 * parameters == 2 * taken["sgd"] and taken["lion"] == 12 * parameters
    assert taken["sgd"] < taken["muon"] < taken["adamw"] == taken["schedule-free"] > taken["adamw8bit"]
    assert taken["lion"] < taken["eva"], "two vectors for each matrix beside the momentum"
    assert "about" in invoke("fit", str(tmp_path), "--memory", "1GB", "--device", "cpu").stdout
    assert "Not one layer" in invoke("fit", str(tmp_path), "--memory", "1MB", "--device", "cpu").stderr
    assert_clear(invoke("fit", str(tmp_path / "none")), 1, "no such folder")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])  # of these only llama unties its head
def test_a_config_alone_has_the_sizes_of_the_weights_to_come(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, tie_word_embeddings=kind != "llama",
        **({"moe_intermediate_size": 32, "num_experts": 4} if kind == "qwen3_moe" else {}),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    shutil.copyfile(tmp_path / "whole" / "config.json", tmp_path / "alone" / "config.json")
    asked = ("fit", str(tmp_path / "whole"), str(tmp_path / "alone" / "config.json"), "--device", "cpu", "--json")
    for options in ((), ("--train",)):
        told = json.loads(invoke(*asked, *options).stdout)
        # The memory of other optimisers depends on shapes; a file has a matrix for each expert, a model one tensor.
        rows = [row for row in told if not options or row["precision"].startswith(("adamw,", "sgd", "lion"))]
        sizes = [{name: row[name] for name in ("precision", "bytes", "units", "max_model_len")} for row in rows]
        half = len(rows) // 2
        assert half == 3 and sizes[:half] == sizes[half:]
        assert ["has no weights" in row["advice"] for row in rows] == [False] * half + [True] * half
    (tmp_path / "alone" / "pytorch_model.bin").touch()
    assert_clear(invoke(*asked[:1], str(tmp_path / "alone")), 1, "pickles")


def test_a_mixture_for_several_machines_is_told_about_groups(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=512, num_hidden_layers=6, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    asked = ("fit", str(tmp_path), "--memory", "76MB", "--device", "cpu", "--rtt", "10")
    row = json.loads(invoke(*asked, "--json").stdout)[0]
    group = row["expert_group"]
    assert row["machines"] > 1 and not group["group"]
    assert group["alone_s"] is None, "what one machine does with its disk is told by itself"
    ratio = group["group_s"] / min(group[name] for name in ("pipeline_s", "alone_s") if group[name])
    assert (
        f"{row['machines']} machines 5 ms apart: no group; " in group["says"] and f"{ratio:.3g} times" in group["says"]
    )
    assert group["group_s"] > 6 * 2 * 0.005 > group["pipeline_s"], "two exchanges a layer, each a delay"
    assert "Experts in float32: decoding (1 at once)" in " ".join(invoke(*asked).stdout.split())
    assert json.loads(invoke(*asked[:3], "1GB", *asked[4:], "--json").stdout)[0]["expert_group"] is None
    checkpoint = Checkpoint(tmp_path)
    sizes = unit_sizes(checkpoint, dtype=torch.float32)
    unused_bytes = sum(entry.nbytes * 6 // 8 for name, entry in checkpoint.entries.items() if ".experts." in name)
    assert sum(sizes.weight_bytes) - sum(_read_bytes(checkpoint, sizes)) == pytest.approx(unused_bytes)


def test_a_mixture_of_safetensors_that_does_not_fit_is_told_which_form_may_lie_on_the_disk(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=512, num_hidden_layers=6, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    asked = ("fit", str(tmp_path), "--device", "cpu", "--json", "--memory")
    told = {memory: json.loads(invoke(*asked, memory).stdout)[0]["advice"] for memory in ("76MB", "1GB")}
    assert told["1GB"] == "" and told["76MB"].startswith("Experts of safetensors stay in memory.")
    checkpoint = Checkpoint(tmp_path)
    for lent, expected in (("76MB", told["76MB"]), ("1GB", "")):
        stage = StageConfig(device="cpu", memory_bytes=parse_bytes(lent, ""), cache_tokens=128)
        assert Hardware.probe(checkpoint, stage).advice == expected
        assert Hardware.probe(checkpoint, stage, needed_units=1).advice == ""


def test_a_gguf_file_fits_before_a_swarm_is_founded_on_it(tmp_path: Path) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf")
    asked = ("fit", str(tmp_path / "tiny.gguf"), "--memory", "1GB", "--device", "cpu")
    rows = json.loads(invoke(*asked, "--json").stdout)
    expected = {"bfloat16", "int8", "nf4"} | ({"packed"} if library() else set())
    assert {row["precision"] for row in rows} == expected and {row["units"] for row in rows} == {4}
    assert all(row["fitting"] == 4 and row["max_model_len"] == 2048 for row in rows)
    assert "tiny.gguf" in invoke(*asked).stdout and [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    assert_clear(invoke("fit", "none.gguf"), 2, "no such GGUF file")


def test_packed_weights_say_what_the_missing_package_would_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama_gguf(tmp_path / "tiny.gguf", form="Q4_0")
    from_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "packed", packs=True)
    cpu = Device("cpu", 0, "CPU", 20 << 30, 15 << 30, shared=True)

    def told(products: str = "fast", folder: str = "packed", dtype: torch.dtype = torch.float32, **more: Any) -> str:
        config = StageConfig(device="cpu", products=products, **more)
        return packed_advice([cpu], Checkpoint(tmp_path / folder), config, dtype)

    lose_ggml(monkeypatch)
    gain, command = "7 times less memory with xllamacpp. Install: ", install_command("xllamacpp")
    assert told() == f"This model would run 3 times faster and take {gain}{command}"
    assert told("exact") == f"This model would take {gain}{command}"
    assert not any((told("plain"), told(quantize="int8"), told(dtype=torch.bfloat16))), "packed weights are not wanted"
    (tmp_path / "outline").mkdir()
    rows = _rows(str(tmp_path / "tiny.gguf"), cpu, None, 0.02, tmp_path / "outline", "plain")
    assert {row["advice"] for row in rows} == {told()}
    save_llama(tmp_path / "plain", 2, vocab_size=64, hidden_size=64, intermediate_size=512)
    assert told(folder="plain") == ""
    lose_ggml(monkeypatch, "this CPU has no AVX2")
    assert told().startswith(
        "xllamacpp cannot be used on this machine (this CPU has no AVX2): the model is slower here"
    )


def test_an_old_processor_does_not_load_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "Library", lambda file: pytest.fail("its code would end the process"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    if importlib.util.find_spec(ggml.PACKAGE) is not None:
        assert ggml._load.__wrapped__() == "this CPU has no AVX2"


def test_modules_and_encoders_fit_as_they_are_exported(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    (encoder,) = json.loads(invoke("fit", str(tmp_path), "--json", "--memory", "1GB", "--rtt", "100").stdout)
    assert encoder["task"] == "embed" and encoder["fitting"] == encoder["units"] > 2
    assert 0.1 < encoder["pass_s"] < 0.2, "who asks leads the pass, a round trip away"
    assert_clear(invoke("fit", "nowhere:make"), 2, "no module nowhere")
    assert_clear(invoke("fit", str(tmp_path / "none.pt2")), 2, "none.pt2")


@pytest.mark.parametrize("option", ["--kv int8", "--memory 2GB", "--rtt 30", "--train"])
@pytest.mark.parametrize("measure", ["--measure", ""])
def test_measuring_refuses_options_of_plans(option: str, measure: str) -> None:
    done = invoke("fit", *option.split(), *measure.split())
    assert_clear(done, 2, f"{option.split()[0]}: --measure times this machine")


def test_a_machine_is_measured_beside_known_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(stopwatch, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(stopwatch, "BUDGET_S", 0.001)
    save_llama(tmp_path, 2, vocab_size=64, hidden_size=64, intermediate_size=512)
    done = invoke("fit", "--measure", str(tmp_path), "--json", "--device", "cpu", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    *modules, layer = told["modules"]
    assert layer["prompt_s"] == pytest.approx(sum(module["prompt_s"] for module in modules))
    assert told["decode_units_per_s"] > 0 and told["disk_read_bytes_per_s"] > 0 and not (tmp_path / "home").exists()
    assert "RTX 3090" in [card["device"] for card in told["cards"]] and told["cards"][0]["decode_units_per_s"] > 0
    by_model = {(row["model"], row["format"]): row for row in told["models"]}
    assert {name for name, _ in by_model} == {*(shape.name for shape in KNOWN_MODELS), str(tmp_path)}
    assert {kind for _, kind in by_model} == {"bfloat16", "int8", "nf4"}
    for row in told["models"]:
        assert row["machines"] is None or row["machines"] == -(-row["layers"] // row["fitting"]), row
    assert (
        by_model[str(tmp_path), "bfloat16"]["machines"] == 1 and by_model[str(tmp_path), "bfloat16"]["tokens_per_s"] > 0
    )
    shown = invoke("fit", "--measure", str(tmp_path), "--device", "cpu", home=tmp_path).stdout
    assert "this machine" in shown and "here" in shown and max(map(len, shown.splitlines()[1:])) <= 80
    assert_clear(invoke("fit", "--dtype", "int4"), 2, "choose auto")
    assert_clear(invoke("fit", "--measure", str(tmp_path / "none")), 1, "no such folder")


def test_each_known_card_has_its_own_speed() -> None:
    """Also the fastest, whose kernels are replayed as a graph. An H100 came to 424 tokens/s through 8 layers."""
    told = _cards(LLAMA_8B.layer.parameters)
    cards = {card["device"]: card["decode_units_per_s"] for card in told}
    for speed in ("decode", "prefill", "training"):
        assert len({card[f"{speed}_units_per_s"] for card in told}) == len(told) > 10
    assert cards["H100 SXM"] > cards["H100 PCIe"] > cards["A100"] > cards["RTX 4090"] > cards["T4"]
    assert cards["H100 PCIe"] == pytest.approx(8 * 424, rel=0.2)


def test_known_models_have_their_published_sizes() -> None:
    """In parameters, with a tied matrix at both ends; and memory for the keys and values of a token."""
    billions = {shape.name: sum(shape.sizes(1, "none").weight_bytes) / 1e9 for shape in KNOWN_MODELS}
    published = {"Llama 3.2 1B": 1.24 + 0.26, "Llama 3 8B": 8.03, "Qwen3 32B": 32.8, "Llama 3 70B": 70.6}
    assert billions == pytest.approx(published, rel=0.005)
    sizes = LLAMA_8B.sizes(2, "nf4")
    assert sizes.weight_bytes[1] == pytest.approx(0.516 * LLAMA_8B.layer.parameters, rel=0.01)
    assert sum(sizes.cache_bytes_per_token) == 131_072


def test_nobody_to_ask_why(tmp_path: Path) -> None:
    assert_clear(invoke("why", home=tmp_path), 1, "no node runs here", "--swarm")
    assert_clear(invoke("why", "--swarm", "nobody", home=tmp_path), 2, "nobody")


def test_a_swarm_of_equal_machines() -> None:
    alone, three = (fit([100] * 9, fitting, read_bytes_per_s=900, rtt_s=0.2) for fitting in (9, 3))
    assert alone is not None and three is not None and fit([100], 0, read_bytes_per_s=1, rtt_s=0) is None
    assert (alone.machines, alone.pass_s) == (1, 1.0)
    assert three.machines == 3 and three.pass_s == pytest.approx(1.3)
