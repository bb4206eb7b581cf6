"""Baseline of serving: one process with the whole model and transformers' `generate`, measured in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

SCRIPT = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(1)
prompt, new, prefill = map(int, sys.argv[3:6])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
def generate(length, new):
    ids = torch.arange(5, 5 + length)[None]
    started = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return time.perf_counter() - started[0], time.process_time() - started[1]
generate(prompt, 4)
for line in sys.stdin:
    first = generate(prompt, 1)
    wall, cpu = ((late - early) / (new - 1) for early, late in zip(first, generate(prompt, new)))
    measured = {"decode_tokens_per_s": 1 / wall, "decode_cpu_s": cpu, "prefill_s": generate(prefill, 1)[0]}
    print(json.dumps(measured), flush=True)
"""


class LocalProcess:
    """The baseline of a checkpoint with one thread: `with LocalProcess(...) as local: local.measure()`.

    `prompt` and `new` are the tokens of what decoding is measured on, `prefill` those of the long prompt.
    """

    def __init__(self, model: Path, *, prompt: int, new: int, prefill: int, dtype: str = "float32") -> None:
        arguments = [sys.executable, "-c", SCRIPT, str(model), dtype, *map(str, (prompt, new, prefill))]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(self) -> dict[str, float]:
        """Measure now, and return `decode_tokens_per_s`, `decode_cpu_s` (CPU seconds of a token) and `prefill_s`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process that measures."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
