"""What a power cut leaves: any file may end at any byte, or be nothing but zeros from there. Nothing of that is taken for whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.files import sync, write_private
from swarmnode.net.identity import Identity
from swarmnode.swarm.storage import small_files
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import CHUNK_BYTES, chunk_hashes, describe_files
from swarmnode.swarm.storage.owner_files import IssuedInvites, open_issued_invites
from swarmnode.swarm.storage.remembered import KnownPeer, KnownPeers
from swarmnode.swarm.storage.small_files import write_stored
from swarmnode.swarm.storage.state_store import FILES, RUN_FILE, StateStore, stored_runs
from tests.swarm.storage.test_states import make_run

BLOCK = b"weights and what they remember " * 10


def torn(whole: bytes) -> Iterator[bytes]:
    """Every beginning, and every beginning with zeros behind it."""
    for end in range(len(whole)):
        yield whole[:end]
        if any(whole[end:]):
            yield whole[:end] + bytes(len(whole) - end)


def open_state(root: Path) -> StateStore:
    return StateStore(root, make_run())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = open_state(tmp_path)
    store.write(10, (0, 1), lambda block, path: path.write_bytes(BLOCK + b"%d" % block) and None)
    store.close()
    return tmp_path


def test_a_torn_state_is_found(home: Path) -> None:
    path = next(home.glob("*/step-*/unit-0000.safetensors"))
    whole = path.read_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        store = open_state(home)
        with pytest.raises(CheckpointError):
            store.path(10, 0)
        assert store.path(10, 1).read_bytes() == BLOCK + b"1", "the others are whole"
        store.close()


def test_a_torn_list_of_a_step_is_found(home: Path) -> None:
    path = next(home.glob(f"*/step-*/{FILES}"))
    whole = path.read_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        store = open_state(home)
        for block in (0, 1):
            with contextlib.suppress(CheckpointError):  # as if it had not been kept
                assert store.path(10, block).read_bytes() == BLOCK + b"%d" % block
        store.close()


def test_a_torn_run_is_written_anew(home: Path) -> None:
    path = next(home.glob(f"*/{RUN_FILE}"))
    whole = path.read_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        open_state(home).close()
        assert path.read_bytes() == whole and [run.id for run in stored_runs(home)] == [make_run().id]


def test_a_torn_chunk_is_fetched_again(tmp_path: Path) -> None:
    """Also where its mark is on the disk."""
    source = tmp_path / "model.safetensors"
    source.write_bytes(BLOCK)
    [file] = describe_files([source])
    folder = tmp_path / "cache"
    folder.mkdir()
    cache = ChunkFolder(folder)
    cache.store_hashes(file, chunk_hashes(source))
    cache.write(file, 0, BLOCK)
    assert len(BLOCK) < CHUNK_BYTES and cache.missing(file, [0]) == []
    for name in (file.name, f".{file.name}.have", f".{file.name}.hashes"):
        whole = (folder / name).read_bytes()
        for data in torn(whole):
            (folder / name).write_bytes(data)
            assert ChunkFolder(folder).missing(file, [0]) == [0], name
        (folder / name).write_bytes(whole)
    assert ChunkFolder(folder).missing(file, [0]) == []


def test_a_torn_identity_is_no_other_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    whole = Identity.load_or_create(path).to_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        with pytest.raises(LocalError):
            Identity.load_or_create(path)


def test_a_torn_guestbook_is_no_shorter_guestbook(tmp_path: Path) -> None:
    path = tmp_path / "friends.guests"
    IssuedInvites(path, revocations=b"what the owner signed").save()
    whole = path.read_bytes()
    for data in torn(whole):
        path.write_bytes(data)
        with pytest.raises(UsageError):
            open_issued_invites(path)


def test_torn_helps_are_none(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    write_stored(path, {"peer": KnownPeer(1.0, ("/ip4/127.0.0.1/tcp/1",))})
    assert KnownPeers(path).addresses()
    for data in torn(path.read_bytes()):
        path.write_bytes(data)
        assert list(KnownPeers(path).addresses()) == [], data


@pytest.mark.parametrize("write", [write_private, lambda path, data: Identity.generate().save(path)])
def test_what_is_done_is_on_the_disk_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    write(tmp_path / "file", b"data")
    assert len(synced) == 2 and "file" in synced[0] and synced[1] == tmp_path.name


def test_a_new_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def note(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr("swarmnode.files.sync", note)
    with small_files.new_folder(tmp_path / "out") as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    assert synced == ["model.safetensors", ".out.partial", tmp_path.name]
