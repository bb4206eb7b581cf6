"""The owner's commands: what they print, and what they refuse in one clear line. Real swarms: tests/real/test_membership.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmnode.errors import UsageError
from swarmnode.membership.owner import with_host_grant
from swarmnode.net.identity import Identity
from swarmnode.swarm.records.invite import OwnedInvite, Role, decode_invite, sign_swarm
from swarmnode.swarm.records.manifest import OPEN, PRIVATE, encode_manifest, swarm_id
from swarmnode.swarm.storage.owner_files import IssuedInvites, issued_invites_path, open_issued_invites, save_owner_key
from swarmnode.swarm.storage.swarmfile import new_swarm, save_swarm
from swarmnode.terminal.formatting import parse_duration
from tests.cli.command import assert_clear, invoke
from tests.swarm.records.test_manifest import make_manifest
from tests.swarm.society import ALICE, OWNER, STRANGER

PASSWORD = "correct horse"


def founded(folder: Path, membership: str = PRIVATE) -> Path:
    """What `create` leaves."""
    path = folder / "friends.swarm"
    raw = encode_manifest(make_manifest(owner=OWNER.public, membership=membership))
    swarm = new_swarm(raw, sign_swarm(swarm_id(raw), OWNER))
    book = IssuedInvites(issued_invites_path(path))
    save_swarm(with_host_grant(swarm, OWNER, book), path)
    book.save()
    save_owner_key(OWNER, path.with_suffix(".owner"), PASSWORD)
    return path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", PASSWORD)
    monkeypatch.delenv("SWARMNODE_OWNER_KEY", raising=False)
    return founded(tmp_path)


def invite_in(line: str) -> OwnedInvite:
    invite = decode_invite(line)
    assert isinstance(invite, OwnedInvite)
    return invite


def test_an_invite_is_one_line_and_is_entered_into_the_book(file: Path) -> None:
    options = (
        "--role",
        "client",
        "--uses",
        "2",
        "--expires",
        "7d",
        "--peer",
        ALICE,
        "--group",
        "berlin",
        "--note",
        "Alice",
    )
    done = invoke("invite", str(file), *options)
    assert done.returncode == 0 and len(done.stdout.split()) == 1, done.stderr
    grant = invite_in(done.stdout).opened_grant()
    assert (grant.allows, grant.uses, grant.peer, grant.group) == (Role.CLIENT, 2, ALICE, "berlin")
    assert grant.expires_at - grant.issued_at == 7 * 86_400
    guest = open_issued_invites(file).guests[-1]
    assert (guest.invite, guest.note) == (grant.invite_id.hex(), "Alice")


def test_as_json_and_for_ever(file: Path) -> None:
    told = json.loads(invoke("invite", str(file), "--json", "--expires", "never").stdout)
    assert invite_in(told.pop("invite")).opened_grant().invite_id.hex() == told.pop("id")
    assert told == {"role": "volunteer", "expires_at": None, "uses": 1, "peer": None, "group": None}


def test_an_invite_is_for_a_volunteer_with_one_machine_for_a_year(file: Path) -> None:
    grant = invite_in(invoke("invite", str(file)).stdout).opened_grant()
    assert (grant.allows, grant.uses, grant.expires_at - grant.issued_at) == (Role.VOLUNTEER, 1, 365 * 86_400)


def test_as_a_qr_code(file: Path) -> None:
    line, *code = invoke("invite", str(file), "--qr").stdout.splitlines()
    assert invite_in(line) and len(code) > 30
    assert len({len(row.rstrip()) for row in code if row.strip()}) == 1, "a square"
    assert set("".join(code)) <= set("█▀▄ ")


def test_what_cannot_be_invited(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_clear(invoke("invite", str(file), "--role", "king"), 2, "volunteer, client, bootstrap, trainer")
    assert_clear(invoke("invite", str(file), "--role", "trainer"), 2, "test serves, so it has no trainers")
    assert_clear(invoke("invite", str(file), "--expires", "soon"), 2, "7d")
    assert_clear(invoke("invite", str(file), "--uses", "5000"), 2, "--uses")
    assert_clear(invoke("invite", str(file), "--peer", "me"), 2, "swarmnode doctor --id")
    assert_clear(invoke("invite", str(tmp_path / "none.swarm")), 2, "no such file")
    (tmp_path / "public").mkdir()
    assert_clear(invoke("invite", str(founded(tmp_path / "public", OPEN))), 2, "not private")


def test_the_key_is_asked_for_in_every_way(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    password = tmp_path / "password"
    monkeypatch.delenv("SWARMNODE_OWNER_PASSWORD")
    assert_clear(invoke("invite", str(file)), 2, "--password-file", "SWARMNODE_OWNER_PASSWORD")
    password.write_text("guess\n")
    assert_clear(invoke("invite", str(file), "--password-file", str(password)), 2, "password is wrong")
    password.write_text(f"{PASSWORD}\nmore\n")
    assert invoke("invite", str(file), "--password-file", str(password)).returncode == 0
    moved = file.with_suffix(".owner").rename(tmp_path / "elsewhere")
    assert_clear(invoke("invite", str(file), "--password-file", str(password)), 2, "only the owner")
    assert invoke("invite", str(file), "--password-file", str(password), "--owner-key", str(moved)).returncode == 0
    for key, code in ((OWNER, 0), (STRANGER, 2)):
        private = Ed25519PrivateKey.from_private_bytes(key.seed)
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        monkeypatch.setenv("SWARMNODE_OWNER_KEY", pem)
        assert invoke("invite", str(file)).returncode == code


def test_who_cannot_be_revoked_is_told_before_anything_is_asked(file: Path) -> None:
    (line,) = invoke("invite", str(file)).stdout.split()
    foreign = invite_in(line)
    assert foreign.grant
    (file.parent / "other").mkdir()
    other = file.parent / "other" / "friends.swarm"
    raw = encode_manifest(make_manifest(name="other", owner=OWNER.public, membership=PRIVATE))
    save_swarm(new_swarm(raw, sign_swarm(swarm_id(raw), OWNER)), other)
    save_owner_key(OWNER, other.with_suffix(".owner"), PASSWORD)
    assert_clear(invoke("revoke", str(other), line), 2, "not an invite that")


def test_create_takes_one_kind_of_membership(tmp_path: Path) -> None:
    done = invoke("create", str(tmp_path / "s"), "--model", "x", "--private", "--public")
    assert_clear(done, 2, "not both")


def test_a_machine_tells_its_ids_and_keeps_them(tmp_path: Path) -> None:
    node = invoke("doctor", "--id", "--home", str(tmp_path)).stdout.strip()
    client = invoke("doctor", "--id", "--home", str(tmp_path), "--client").stdout.strip()
    assert node == Identity.load_or_create(tmp_path / "node.key").peer_id
    assert client == Identity.load_or_create(tmp_path / "client.key").peer_id
    assert node != client and invoke("doctor", "--id", "--home", str(tmp_path)).stdout.strip() == node
    assert json.loads(invoke("doctor", "--id", "--home", str(tmp_path), "--json").stdout) == {"id": node}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("1.5w", 907_200)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0d", "1y", "99999w"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="7d"):
        parse_duration(text)
