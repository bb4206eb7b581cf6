"""Checkpoints by hub name, against a small hub on this machine: only the shards of the span are fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from swarmnode.compute.model.hub import HubCheckpoint, open_checkpoint, read_range
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The folder as the repository "org/model", whose tag is v1; `fetched` lists the files that were downloaded whole. Where it
    has a `token` nobody else gets a file, but `refusal`. `cut`: how many downloads break half-way; `damage`: in how many a
    byte is another one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fetched: list[str] = []
        self.token = ""
        self.refusal = 401
        self.cut = 0
        self.damage = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "model"]:
            if parts[4:5] == ["revision"] and parts[5] not in ("main", "v1", COMMIT):
                self._send(b"", with_body, status=404, headers={"X-Error-Code": "RevisionNotFound"})
                return
            root = self.server.folder
            files = [{"rfilename": file.relative_to(root).as_posix()} for file in root.rglob("*") if file.is_file()]
            self._send(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": files}).encode(), with_body)
            return
        file = self.server.folder.joinpath(*parts[4:])
        if parts[:3] != ["org", "model", "resolve"] or not file.is_file():
            code = "EntryNotFound" if parts[:2] == ["org", "model"] else "RepoNotFound"
            self._send(b"", with_body, status=404, headers={"X-Error-Code": code})
            return
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._send(b"", with_body, status=self.server.refusal, headers={"X-Error-Code": "GatedRepo"})
            return
        body = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if "Range" in self.headers:
            begin, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            whole, body = len(body), body[int(begin) : int(last or len(body)) + 1]
            headers["Content-Range"] = f"bytes {begin}-{int(begin) + len(body) - 1}/{whole}"
            self._send(body, with_body, status=206, headers=headers)
            return
        if with_body:
            self.server.fetched.append(file.name)
        weights = with_body and file.suffix in (".safetensors", ".gguf")
        if weights and self.server.damage:
            self.server.damage -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        if weights and self.server.cut:
            self.server.cut -= 1
            headers["Content-Length"], body = str(len(body)), body[: len(body) // 2]
            self.close_connection = True
        self._send(body, with_body, headers=headers)

    def _send(self, body: bytes, with_body: bool, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_default(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub of whoever names none."""
    name_of_a_file = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", name_of_a_file)


@pytest.fixture
def hub(checkpoint_path: Path) -> Iterator[Hub]:
    with serving(checkpoint_path) as server:
        yield server


def test_a_span_fetches_its_shards_only(hub, model, tmp_path):
    checkpoint = HubCheckpoint("org/model", cache_dir=tmp_path, endpoint=hub.url)
    assert checkpoint.units == 6
    assert not [file for file in hub.fetched if file.endswith(".safetensors")]
    shards = {checkpoint.entries[name].file.name for name in checkpoint.tensors_of(2, 3)}
    span = load_span(checkpoint, 2, 3, check=False)
    assert {file for file in hub.fetched if file.endswith(".safetensors")} == shards
    assert len(shards) < len(list(hub.folder.glob("*.safetensors")))
    for name, parameter in span.model.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name])


def test_names_that_are_nothing_are_told(hub, tmp_path, checkpoint_path):
    with pytest.raises(CheckpointError, match="neither a folder here nor a model on the hub"):
        HubCheckpoint("org/nothing", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(CheckpointError, match="no such folder; check its name"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither"):
        HubCheckpoint("not a name!", endpoint=hub.url)
    assert open_checkpoint(checkpoint_path).units == 6


def test_without_a_network_it_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        HubCheckpoint("org/model", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def test_bytes_of_a_file_are_read_and_nothing_is_kept(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    name = "config.json"
    whole = (hub.folder / name).read_bytes()
    assert read_range("org/model", name, 3, 40, endpoint=hub.url) == whole[3:43]
    assert read_range("org/model", name, 0, len(whole), endpoint=hub.url) == whole
    assert not hub.fetched and not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="does not give"):
        read_range("org/model", name, len(whole) - 5, 40, endpoint=hub.url)


def test_another_revision_than_the_newest(hub, tmp_path, monkeypatch):
    make_default(hub, monkeypatch)
    checkpoint = open_checkpoint("org/model@v1", cache_dir=tmp_path)
    assert (checkpoint.repository, checkpoint.revision) == ("org/model", COMMIT)
    with pytest.raises(CheckpointError, match="org/model: has no revision v9"):
        open_checkpoint("org/model@v9", cache_dir=tmp_path)


@pytest.mark.parametrize("refusal", [401, 403])
def test_a_gated_model_asks_for_consent_and_a_token(hub, tmp_path, monkeypatch, refusal):
    hub.token, hub.refusal = "hf_of_somebody", refusal
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"asks for consent.*HF_TOKEN"):
        HubCheckpoint("org/model", cache_dir=tmp_path, endpoint=hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert HubCheckpoint("org/model", cache_dir=tmp_path, endpoint=hub.url).units == 6


def test_a_download_that_breaks_goes_on_by_itself(hub, tmp_path):
    checkpoint = HubCheckpoint("org/model", cache_dir=tmp_path, endpoint=hub.url)
    hub.cut = 1
    assert checkpoint.open_slices(checkpoint.tensor_names).keys() == set(checkpoint.tensor_names)
    assert hub.fetched.count(min(hub.folder.glob("*.safetensors")).name) == 2


def test_what_was_damaged_on_its_way_is_removed_and_fetched_again(hub, tmp_path):
    checkpoint = HubCheckpoint("org/model", cache_dir=tmp_path, endpoint=hub.url)
    hub.damage = 1
    with pytest.raises(CheckpointError, match="damaged on its way here"):
        checkpoint.open_slices(checkpoint.tensor_names)
    assert checkpoint.open_slices(checkpoint.tensor_names).keys() == set(checkpoint.tensor_names)
