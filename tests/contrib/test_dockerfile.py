"""The Dockerfile, as far as it can be judged without an engine, and the reader that carries it out where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import PurePosixPath

import pytest

from tests.contrib.command_line import parse
from tests.contrib.script import CONTRIB, ROOT, load

dockerfile = load(CONTRIB / "docker" / "dockerfile.py")
BUILD, IMAGE = dockerfile.read(ROOT / "Dockerfile")
IGNORE = dockerfile.Ignore((ROOT / ".dockerignore").read_text())


def test_a_dockerfile_is_read() -> None:
    first, second = dockerfile.stages(
        "# a comment\n"
        "FROM debian AS build\n"
        "RUN --mount=type=cache,target=/a --network=none \\\n    # inside\n    first \\\n    && second\n"
        "FROM scratch\n"
        "COPY --from=build a b /to/\n"
        'ENTRYPOINT ["x", "--flag"]\n'
        "ENV A=1 \\\n    B='two words'\n"
        "USER one\nUSER two\n"
    )
    assert (first.base, first.name, second.base, second.name) == ("debian", "build", "scratch", None)
    [run] = first.instructions
    assert run.text == "first && second"
    assert (run.flag("mount"), run.flag("network"), run.flag("from")) == ("type=cache,target=/a", "none", None)
    assert second.last("COPY").flag("from") == "build" and second.last("COPY").words == ["a", "b", "/to/"]
    assert second.last("ENTRYPOINT").words == ["x", "--flag"]
    assert second.last("ENV").pairs == {"A": "1", "B": "two words"}
    assert second.last("USER").text == "two" and second.last("VOLUME") is None


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="ARG before the first FROM"):
        dockerfile.stages("ARG A=1\nFROM debian:$A\n")


def test_variables_are_expanded() -> None:
    assert dockerfile.expand("/a:$PATH:${B}c$NONE", {"PATH": "/bin", "B": "b"}) == "/a:/bin:bc"


@pytest.mark.parametrize(
    ("path", "stays_out"),
    [
        ("tests", True),
        ("pyproject.toml", False),
        ("swarmnode", False),
        ("swarmnode/cli/main.py", False),
        ("swarmnode/cli/__pycache__", True),
        ("swarmnode/cli/__pycache__/main.pyc", True),
        ("docs/README.md", True),
    ],
)
def test_what_enters_the_build(path: str, stays_out: bool) -> None:
    assert IGNORE(PurePosixPath(path)) is stays_out


def test_all_that_is_copied_from_the_repository_is_there_and_enters() -> None:
    copies = [each for each in BUILD.instructions if each.keyword == "COPY"]
    sources = [source for copy in copies for source in copy.words[:-1]]
    assert sources and all((ROOT / source).exists() and not IGNORE(PurePosixPath(source)) for source in sources)


def test_nothing_enters_the_image_but_through_the_first_stage() -> None:
    copies = [each for each in IMAGE.instructions if each.keyword in ("COPY", "ADD")]
    assert [copy.flag("from") for copy in copies] == [BUILD.name]


def test_the_process_is_nobody_of_importance_and_gets_the_signals() -> None:
    assert IMAGE.last("USER").text not in ("root", "0")
    assert IMAGE.last("ENTRYPOINT").text.startswith("[")  # a shell in between would keep the signals for itself
    assert IMAGE.last("ENTRYPOINT").words[-1] == "swarmnode"


def test_the_first_command_is_one() -> None:
    assert IMAGE.last("CMD").words == ["--help"]
    assert {parse([role, "x.swarm"]) for role in ("run", "host")} == {"run", "host"}


class Answering(HTTPServer):
    """A server on loopback that answers every question with one code."""

    code = 200


@pytest.fixture
def server() -> Iterator[Answering]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, Answering)
            self.send_response(self.server.code if self.path == "/metrics" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with Answering(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check_health(port: int, host: str = "127.0.0.1") -> bool:
    """Run the image's health check on this machine."""
    health = IMAGE.last("HEALTHCHECK")
    program, *arguments = dockerfile.Instruction("CMD", health.text.removeprefix("CMD").strip()).words
    assert program == "python"
    environment = {**os.environ, "SWARMNODE_METRICS_HOST": host, "SWARMNODE_METRICS_PORT": str(port)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True).returncode == 0


def test_health_is_an_answer(server: Answering) -> None:
    assert check_health(server.server_port)
    assert check_health(server.server_port, "0.0.0.0")  # as in compose, where Prometheus asks from outside


def test_an_error_is_no_health(server: Answering) -> None:
    server.code = 500
    assert not check_health(server.server_port)


def test_silence_is_no_health(server: Answering) -> None:
    port = server.server_port
    server.shutdown()
    server.server_close()
    assert not check_health(port)
