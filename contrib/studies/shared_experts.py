"""Gain of sharing a mixture's experts in the networks that people own, by `swarmnode/plan/expert_groups.py`. Prints JSON.

    python contrib/studies/shared_experts.py

Each figure is the speed of a group relative to the faster one of a pipeline and machines by themselves; above 1.15 the planner
would want the group. `qwen3-30b` has 48 layers of 128 experts of 4.7 M parameters, 8 of them active; `deepseek-v3` 58 layers of 256
experts of 44 M, 8 active. Weights have 0.56 bytes (4 bits with scales) for decoding and prompts, and 2 in training. A `card` is an
RTX 3090 (24 GB; experts beyond it in host memory, 12 GB/s), a `computer` has 0.5 TFLOP/s, 60 GB/s, 64 GB and a disk of 2
GB/s; `roomy` ones hold everything. Work: one conversation (`token`), sixteen, a prompt of 512 tokens, and a step of 32
microbatches of 1,024 tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from swarmnode.plan.expert_groups import (
    CARDS,
    LAN,
    WAN,
    ExpertMixture,
    GroupMachine,
    GroupNetwork,
    GroupWork,
    WorkKind,
    compare,
)

MIXTURES = {
    "qwen3-30b": ExpertMixture(48, 2048, 128, 8, 3 * 2048 * 768, 18.9e6, 0.56),
    "deepseek-v3": ExpertMixture(58, 7168, 256, 8, 3 * 7168 * 2048, 231e6, 0.56),
}
MACHINES = {
    "card": GroupMachine(28e12, 650e9, 22e9, 12e9, 36e-6),
    "roomy card": GroupMachine(28e12, 650e9, 0.0, 12e9, 36e-6),
    "computer": GroupMachine(0.5e12, 60e9, 60e9, 2e9),
    "roomy computer": GroupMachine(0.5e12, 60e9, 0.0, 2e9),
}
LINKS = {
    "internet, 100 Mbit/s, 10 ms": WAN,
    "1 Gbit/s": LAN,
    "2.5 Gbit/s": replace(LAN, bytes_per_s=2.5 * LAN.bytes_per_s),
    "10 Gbit/s": replace(LAN, bytes_per_s=10 * LAN.bytes_per_s),
    "one machine's PCIe": CARDS,
}
WORKS = {
    "token": GroupWork(WorkKind.DECODING, 1),
    "sixteen": GroupWork(WorkKind.DECODING, 16),
    "prompt": GroupWork(WorkKind.PROMPTS, 1, 512),
    "step": GroupWork(WorkKind.TRAINING, 32, 1024),
}


def main() -> None:
    rows: list[dict[str, Any]] = []
    for model, mixture in MIXTURES.items():
        for machine, member in MACHINES.items():
            for link, cost in LINKS.items():
                for members in (2, 4, 8):
                    gains = {}
                    for name, work in WORKS.items():
                        sized = replace(mixture, weight_bytes=2.0) if work.kind is WorkKind.TRAINING else mixture
                        compared = compare(sized, member, GroupNetwork(members, cost), work)
                        gains[name] = round(compared.gain, 2)
                    rows.append({"model": model, "machine": machine, "link": link, "members": members, **gains})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
