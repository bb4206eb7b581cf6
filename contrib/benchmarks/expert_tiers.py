"""A packed mixture with memory for a part of its experts: decoding and prompts beside the disk's bound. Prints JSON.

    python contrib/benchmarks/expert_mixture.py train FOLDER
    python contrib/benchmarks/expert_mixture.py routes FOLDER
    python contrib/benchmarks/expert_tiers.py FOLDER [--slots 8] [--rounds 5] [--tokens 32] [--layers 24] [--long]

The routes of a trained mixture (`expert_mixture.py`) are imposed on a random model of about 2 GB in Q4_K: 24 layers (`--layers`)
of 32 experts of 2.7 MB, 4 of them active. Layer l takes the routes of layer l modulo 8, further on in the text for each eight
layers. One thread.

    decode   a step of one session: seconds with all experts in memory and with slots, bytes that were read, speed of the disk with
             reads past the page cache of the same pieces in the same round, and the bound: the larger of computing with all
             experts in memory and the missed bytes at the disk's speed. `of_bound` is the bound / measured, a median of rounds.
             `willneed_s` is a step with the same slots whose missing experts come through the page cache: WILLNEED as soon as the
             router has spoken, then a read of the pages, which are dropped. `of_willneed` is that / measured.
    prompt   512 tokens: with slots / with all experts in memory.
    long     (--long) speed after 4,000 tokens / after 200.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from experts import Mixture, write_mixture
from packed import packed_folder
from torch import Tensor

from swarmnode.compute.expert_slots import ByteRange, ExpertSlots
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.compute.serving.runner import RunnerConfig, StageRunner, StepInput

MIXTURE, FORM = Mixture(experts=32, inner=1536, used=4), "Q4_K"
PROMPT, LONG = 512, 4000


class Routed:
    """Model whose routers choose what the recorded text chose, as a session that decodes."""

    def __init__(self, checkpoint: Checkpoint, routes_NLK: Tensor, slots: int) -> None:
        span = load_span(
            checkpoint, 0, checkpoint.units, dtype=torch.float32, products="fast", expert_slots=slots, check=False
        )
        self.span, self._routes_NLK, self._at = span, routes_NLK, 0
        self._runner = StageRunner(span, RunnerConfig(cache_bytes=1 << 30))
        routers = [one for one in span.model.modules() if type(one).__name__.endswith("TopKRouter")]
        for number, router in enumerate(routers):
            router.register_forward_hook(lambda _module, _inputs, output, number=number: self._impose(number, output))
        self._sessions = 0
        self._open()

    def _open(self) -> None:
        if self._sessions:
            self._runner.close(self._sessions)
        self._sessions += 1
        self._runner.open(self._sessions, rows=1, max_length=1024)
        self._length = 0

    def _impose(self, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        first = self._at + 1000 * (layer // self._routes_NLK.shape[1])
        places = torch.arange(first, first + len(output[2])) % len(self._routes_NLK)
        chosen_NK = self._routes_NLK[places, layer % self._routes_NLK.shape[1]]
        return output[0], torch.full_like(output[1], 1 / MIXTURE.used), chosen_NK.to(output[2].dtype)

    def run(self, positions: int, *, at: int) -> float:
        """Compute the next `positions` of the text from token `at` on in one pass. Returns the seconds."""
        if self._length + positions > 1024:
            self._open()
        self._at = at
        began_s = time.perf_counter()
        self._runner.run([StepInput(self._sessions, torch.full((1, positions), 7))])
        self._length += positions
        return time.perf_counter() - began_s

    def decode(self, tokens: int, *, at: int) -> float:
        """Compute some tokens one by one. Returns the seconds of the median token."""
        return statistics.median(self.run(1, at=at + number) for number in range(tokens))

    def mean_step(self, tokens: int, *, at: int) -> float:
        """Compute some tokens one by one. Returns the mean seconds of a token: what waits for the disk counts."""
        return sum(self.run(1, at=at + number) for number in range(tokens)) / tokens


def disk_speed(slots: ExpertSlots, experts: int) -> float:
    """Return the bytes per second that the same workers read with the same pieces, of experts in a random order, into nothing."""
    places = [slots.layers[number % len(slots.layers)]._places for number in torch.randperm(experts).tolist()]
    reader = ExpertSlots(
        [[places[number][(number * 7) % MIXTURE.experts] for number in range(experts)]], experts, lambda *_: None
    )
    began_s = time.perf_counter()
    list(reader.layers[0].visit(dict.fromkeys(range(experts), 1)))
    taken_s = time.perf_counter() - began_s
    reader.close()
    return reader.read_bytes / taken_s


def read_by_willneed(slots: ExpertSlots) -> None:
    """Let slots read through the page cache. The kernel reads all missing experts ahead, and one worker copies pages."""
    for file in slots._files.values():
        file.close()
        file.number, file._is_direct = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC), False
    put, slots._workers = slots._put, 1

    def told(read: Any, places: Sequence[ByteRange]) -> None:
        for place in places:
            number, size = slots._files[place.file].number, place.end - place.begin
            os.posix_fadvise(number, place.begin, size, os.POSIX_FADV_WILLNEED)
        put(read, places)

    slots._put = told  # type: ignore[method-assign]


def compare(checkpoint: Checkpoint, routes_NLK: Tensor, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one process."""
    memory, disk, cached = (Routed(checkpoint, routes_NLK, count) for count in (0, options.slots, options.slots))
    slots, other = disk.span.experts_on_disk, cached.span.experts_on_disk
    assert slots is not None and other is not None
    read_by_willneed(other)
    for each in (memory, disk, cached):
        each.run(PROMPT, at=0)
    turns: list[dict[str, float]] = []
    for number in range(options.rounds + 1):
        at = PROMPT + number * options.tokens
        computing_s = memory.decode(options.tokens, at=at)
        hits, reads, size = slots.hits, slots.reads, slots.read_bytes
        cpu_s = time.process_time()
        taken_s = disk.mean_step(options.tokens, at=at)
        cpu_s = (time.process_time() - cpu_s) / options.tokens
        willneed_s = cached.mean_step(options.tokens, at=at)
        missed = (slots.read_bytes - size) / options.tokens
        speed = disk_speed(slots, 96)
        hits, reads = slots.hits - hits, slots.reads - reads
        bound_s = max(computing_s, missed / speed)
        turns.append(
            {
                "memory_s": computing_s,
                "slots_s": taken_s,
                "willneed_s": willneed_s,
                "cpu_s": cpu_s,
                "missed_MB": missed / 1e6,
                "disk_MB_per_s": speed / 1e6,
                "hits": hits / (hits + reads),
                "of_bound": bound_s / taken_s,
                "of_sum": (computing_s + missed / speed) / taken_s,
                "of_willneed": willneed_s / taken_s,
            }
        )
    yield {"row": "decode", "slots": options.slots, **medians(turns[1:])}
    pairs = []
    for number in range(options.rounds):
        at = PROMPT * (number + 2)
        pairs.append((memory.run(PROMPT, at=at), disk.run(PROMPT, at=at)))
    of_memory = statistics.median(own_s / other_s for own_s, other_s in pairs)
    yield {
        "row": "prompt",
        "memory_s": round(pairs[-1][0], 3),
        "slots_s": round(pairs[-1][1], 3),
        "of_memory": of_memory,
    }
    if options.long:
        early_s = [disk.run(1, at=at) for at in range(1, 301)][200:]
        for at in range(301, LONG):
            disk.run(1, at=at)
        late_s = [disk.run(1, at=at) for at in range(LONG, LONG + 100)]
        yield {"row": "long", "after_4000_of_after_200": statistics.median(early_s) / statistics.median(late_s)}


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(turn[name] for turn in turns), 4) for name in turns[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with routes.pt")
    parser.add_argument("--slots", type=int, default=MIXTURE.experts // 4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--model", type=Path, help="GGUF file, which is written if it is not there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    routes_NLK = torch.load(options.folder / "routes.pt")["routes"]
    with tempfile.TemporaryDirectory() as place:
        file = options.model or Path(place) / "mixture.gguf"
        if not file.exists():
            write_mixture(file, MIXTURE, FORM, layers=options.layers)
        checkpoint = Checkpoint(packed_folder(file, file.parent))
        for row in compare(checkpoint, routes_NLK, options):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
