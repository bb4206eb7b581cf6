"""A Prometheus server of Debian's package, on loopback, with the configuration that the project ships."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from swarmnode.net.libp2p.daemon import die_with_parent

CONTRIB = Path(__file__).parents[2] / "contrib"
SCRAPE_S = 1
START_TIMEOUT_S = 240.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt install prometheus)",
)


def promtool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    return subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=240)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Prometheus:
    """`with Prometheus(folder) as server`: scrapes what the files in `folder/targets` name, every second."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(CONTRIB / "prometheus", folder)
        self.targets = folder / "targets"
        self.targets.mkdir()
        self._config = folder / "prometheus.yml"
        self._config.write_text(self._config.read_text().replace("15s", f"{SCRAPE_S}s").replace("30s", "2s"))
        self._url = f"http://127.0.0.1:{free_port()}"
        with (folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Prometheus:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < deadline_s, self.log()
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"<Prometheus at {self._url}>"

    def log(self) -> str:
        """What the server said."""
        return (self._config.parent / "log.txt").read_text()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready") as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data that an endpoint of the API answers with."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[float]:
        """The finite values of an expression now."""
        values = [float(sample["value"][1]) for sample in self.ask("query", query=expression)["result"]]
        return [value for value in values if math.isfinite(value)]

    def wait_for_values(self, expressions: Sequence[str], timeout_s: float) -> list[str]:
        """Wait until each expression has given a finite value; those that have not."""
        deadline_s = time.monotonic() + timeout_s
        missing = list(expressions)
        while missing and time.monotonic() < deadline_s:
            missing = [expression for expression in missing if not self.query(expression)]
            time.sleep(SCRAPE_S / 2)
        return missing

    def wait_for_nothing(self, expression: str, timeout_s: float) -> None:
        """Wait until an expression gives no value any more, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        while self.query(expression) and time.monotonic() < deadline_s:
            time.sleep(SCRAPE_S / 2)

    def wait_for_alerts(self, names: set[str], timeout_s: float) -> set[str]:
        """Wait until these alerts are pending or firing; those that are not."""
        deadline_s = time.monotonic() + timeout_s
        missing = set(names)
        while missing and time.monotonic() < deadline_s:
            missing -= {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"]}
            time.sleep(SCRAPE_S / 2)
        return missing
