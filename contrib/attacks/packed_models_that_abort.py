"""A founder's packed model has head counts, groups and sizes at which ggml asserts, to end the process of each volunteer.

The files come from a founder that skips all own checks: nodes see a config, an index and bytes that agree with each other.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attack import Outcome, main

VIRTUAL, FAST = True, True
BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BASE |= {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": False}
TRIES = (
    {"num_key_value_heads": (0, -1, 3, 8, 1 << 20, None, 2.0)},
    {"num_attention_heads": (0, -4, 1, 3, 5, 1 << 40)},
    {"head_dim": (0, -16, 7, 8, 1, 1 << 33)},
    {"intermediate_size": (0, -32, 48, 31, 1)},
    {"hidden_size": (0, -64, 48, 1), "head_dim": (16,)},
    {"vocab_size": (0, -1, 1)},
    {"num_hidden_layers": (0, -1, 4000)},
    {
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": 0},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": -1},
        )
    },
)


def configs() -> Iterator[dict[str, Any]]:
    """Yield configs with one or two sizes out of reason, and last a sound one."""
    for heads, groups in itertools.product((4, 3), (3, 1, 5)):
        yield {**BASE, "num_attention_heads": heads, "num_key_value_heads": groups}
    for tries in TRIES:
        yield from ({**BASE, **dict(zip(tries, values, strict=True))} for values in itertools.product(*tries.values()))
    yield BASE


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write a packed model of this config: matrices in Q8_0, or in F16 if their rows have no whole blocks, and norms."""
    import torch

    from swarmnode.compute.model.checkpoint_writer import write_tensors
    from swarmnode.compute.packing.ggml import FORMATS

    def size(name: str, otherwise: int) -> int:
        value = config[name]
        return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 12 else otherwise

    hidden, inner, words = size("hidden_size", 64), size("intermediate_size", 96), size("vocab_size", 64)
    head, groups = size("head_dim", 16), size("num_key_value_heads", 4)
    queries, keys = head * size("num_attention_heads", 4), head * groups
    block = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    block |= {"self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    block |= {"mlp.down_proj": (hidden, inner)}
    matrices = {"model.embed_tokens.weight": (words, hidden), "lm_head.weight": (words, hidden)}
    matrices |= {f"model.layers.0.{name}.weight": shape for name, shape in block.items()}
    index, begin = {}, 0
    with (folder / "weights.gguf").open("wb") as file:
        for name, (outputs, inputs) in matrices.items():
            form = FORMATS["F16" if inputs % 32 else "Q8_0"]
            end = begin + file.write(bytes(outputs * form.row_bytes(inputs)))
            place = {"file": file.name.rpartition("/")[2], "format": form.name, "shape": [outputs, inputs]}
            index[name] = {**place, "begin": begin, "end": end}
            begin = end
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    write_tensors(
        folder / "model.safetensors", {f"{name}.weight": torch.ones(hidden) for name in norms}, {"format": "pt"}
    )
    (folder / "packed.json").write_text(json.dumps({"format": 1, "tensors": index}))
    (folder / "config.json").write_text(json.dumps(config))


def load() -> None:
    """Load each model as a node does and compute a pass, in this process. Print each one's number, and what happened."""
    import torch

    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.compute.serving.loading import load_span
    from swarmnode.errors import CheckpointError

    torch.set_num_threads(1)
    for number, config in enumerate(configs()):
        print(number, end=" ", flush=True)
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), config)
            try:
                checkpoint = Checkpoint(name)
                span = load_span(checkpoint, 0, checkpoint.units, products="fast", check=False)
                with torch.inference_mode():
                    span.forward(torch.zeros(1, 3, dtype=torch.int64), cache=None, position_ids=torch.arange(3)[None])
                print("computed", flush=True)
            except CheckpointError:
                print("refused", flush=True)


def outcome() -> Outcome:
    """Load the models in a process of their own, which would end as a node's would."""
    child = subprocess.run(
        [sys.executable, __file__, "child"], capture_output=True, text=True, timeout=300, check=False
    )
    told = [line.split()[-1] for line in child.stdout.splitlines() if line.endswith(("refused", "computed"))]
    count = sum(1 for _ in configs())
    if child.returncode or len(told) < count or told[-1] != "computed":
        last = child.stderr.strip().rpartition("\n")[2]
        return Outcome(False, f"the node ended with {child.returncode} at model {len(told)} of {count}: {last}")
    return Outcome(True, f"{told.count('refused')} of {count} models refused in a sentence, the others computed")


async def attack() -> Outcome:
    return outcome()


if sys.argv[1:] == ["child"]:
    sys.path.append(str(Path(__file__).parents[2]))
    load()
else:
    main(__name__, attack, virtual=VIRTUAL)
