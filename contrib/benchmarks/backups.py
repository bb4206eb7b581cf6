"""Cost and use of backing up the states of units with a single holder on other peers' disks. Prints JSON.

    python contrib/benchmarks/backups.py [--steps 40] [--hidden 256] [--layers 4] [--checkpoint-steps 5] [--upload 20Mbit]

Two nodes hold a half of the model each and lend an uplink of `--upload`; the bootstrap peer keeps their states.
Median seconds of a step without and with backups, the bytes that they took, and then: the holder of one half is killed with -9, its
home is removed, and a newcomer is started without being told anything; seconds until the next step, and how far the losses are from
those of the run without a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
import typing
from pathlib import Path

from training import SEQUENCE, TIMEOUT_S, make_checkpoint

from swarmnode.localswarm import LocalSwarm

LOOK_S = 0.1
GOES_ON_S = 300.0  # at most, after the holder is lost


class Log:
    """The lines in a trainer's log, by step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def steps(self) -> dict[int, dict[str, float]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return {line["step"]: line for line in map(json.loads, lines)}

    def wait_for(self, step: int, *, within_s: float) -> None:
        give_up_s = time.monotonic() + within_s
        while max(self.steps(), default=-1) < step:
            if time.monotonic() > give_up_s:
                raise SystemExit(f"no step {step} within {within_s:.0f} s")
            time.sleep(LOOK_S)


def kept(home: Path) -> dict[Path, int]:
    """Return the backups at a peer by path, with their bytes."""
    found = {}
    for path in home.glob("backups/*/*/*/step-*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_size
    return found


class Bench:
    """Training runs of one model with one set of settings."""

    def __init__(self, folder: Path, model: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._model = model
        self._options = options

    def train(self, name: str, min_holders: int, *, kill_after: int | None = None) -> dict[str, typing.Any]:
        """Train one whole run. After the step `kill_after`, one node is killed for good as soon as its state is kept
        elsewhere. Raises SystemExit if the trainer fails, or no step follows the kill in time."""
        options, folder = self._options, self._folder / name
        folder.mkdir()
        units = options.layers + 2
        log, seen, report = Log(folder / "log"), dict[Path, int](), dict[str, typing.Any]()
        with LocalSwarm(folder) as local:
            local.create(self._model, "--mode", "train")
            door = local.bootstrap()
            lends = ["--min-holders", str(min_holders), "--max-upload", options.upload, "--compress", "none"]
            spans = f"0:{units // 2}", f"{units // 2}:{units}"
            nodes = [local.node(f"node-{number}", "--span", span, *lends) for number, span in enumerate(spans)]
            for node in nodes:
                node.wait_for("ready")
            settings = [
                "--data", typing.__file__, "--steps", str(options.steps), "--batch", "8", "--microbatch", "4",
                "--sequence", str(SEQUENCE), "--checkpoint-steps", str(options.checkpoint_steps),
            ]  # fmt: skip
            trainer = local.trainer("trainer", "--log", str(folder / "log"), *settings)
            while max(log.steps(), default=-1) < options.steps - 1:
                seen.update(kept(door.home))
                is_kept = any(path.stem == f"unit-{units - 1:04d}" for path in seen)
                if kill_after is not None and is_kept and max(log.steps(), default=-1) >= kill_after:
                    nodes[1].kill()
                    shutil.rmtree(nodes[1].home)
                    killed_s, done = time.monotonic(), max(log.steps())
                    local.node("newcomer", *lends)
                    log.wait_for(done + 1, within_s=GOES_ON_S)
                    report["goes_on_after_s"] = round(time.monotonic() - killed_s, 1)
                    kill_after = None
                time.sleep(LOOK_S)
            if trainer.finish(TIMEOUT_S):
                raise SystemExit(f"the trainer failed: {trainer.tail()}")
        step_s = [line["step_s"] for step, line in log.steps().items() if step]
        report["step_s"], report["run_s"] = round(statistics.median(step_s), 3), round(sum(step_s), 1)
        report["backup_mb"] = round(sum(seen.values()) / 1e6, 1)
        report["losses"] = [log.steps()[step]["loss"] for step in sorted(log.steps())]
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 40), ("hidden", 256), ("layers", 4), ("checkpoint-steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--upload", default="20Mbit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "model", options.layers, options.hidden)
        bench = Bench(folder, folder / "model", options)
        without, backed = bench.train("without", 1), bench.train("with", 2)
        killed = bench.train("killed", 2, kill_after=options.steps // 2)
    undisturbed = without.pop("losses")
    for report in (backed, killed):
        losses = report.pop("losses")
        report["losses_differ_by"] = max(abs(one / other - 1) for one, other in zip(losses, undisturbed, strict=True))
    print(
        json.dumps(
            {"settings": vars(options), "without": without, "with": backed, "holder lost for good": killed}, indent=2
        )
    )


if __name__ == "__main__":
    main()
