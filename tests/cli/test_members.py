"""`swarmnode members` and `revoke`: what the owner reads of members and invites, and whom a word means, with nobody online."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from swarmnode.cli.host.members import ago, end, invites_table, members_table
from swarmnode.client.owner_client import OFFLINE, OwnersView
from swarmnode.errors import UsageError
from swarmnode.membership.owner import InviteTerms, issue_invite
from swarmnode.net.identity import Identity
from swarmnode.swarm.records.invite import Role
from swarmnode.swarm.records.membership import home_digest, open_list
from swarmnode.swarm.storage.owner_files import (
    MAX_PEERS_OF_AN_INVITE,
    SEEN_STEP_S,
    AdmittedPeer,
    IssuedInvites,
    open_admitted_peers,
    open_issued_invites,
    record_members,
)
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.cli.command import assert_clear, invoke
from tests.cli.test_owner import PASSWORD, founded
from tests.swarm.society import ALICE, ANOTHER_HOME, BOB, CAROL, HOME, OWNER

HOUR_S = 3600
LONG_AGO = int(time.time()) - 30 * 24 * HOUR_S


class Book:
    """The owner's files of a swarm of which nobody is online."""

    def __init__(self, folder: Path) -> None:
        self.file = founded(folder)

    @property
    def invites(self) -> IssuedInvites:
        return open_issued_invites(self.file)

    def invite(self, **terms: object) -> str:
        """Give out an invite; its id."""
        _, guest = issue_invite(load_swarm(self.file), OWNER, InviteTerms(**terms), self.invites)  # type: ignore[arg-type]
        return guest.invite

    def came(self, peer: str, invite: str, *, home: bytes = b"", name: str = "", at: int = LONG_AGO) -> None:
        """Somebody came by an invite, was seen by a node of the owner, and left."""
        seen = AdmittedPeer(peer, invite, home.hex(), "volunteer", "", 0, at, at, name)
        record_members(self.file, [seen])

    def view(self) -> OwnersView:
        return asyncio.run(OwnersView.read(load_swarm(self.file), self.invites, None))

    def revoked(self, who: str) -> dict[str, object]:
        """What `revoke` says, which nobody hears."""
        done = invoke("revoke", str(self.file), who, "--json", home=self.file.parent / "home")
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        assert told["told"] == 0
        return told

    @property
    def list(self):
        swarm = load_swarm(self.file)
        return open_list(self.invites.revocations, swarm.id, swarm.owner)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", PASSWORD)
    monkeypatch.setattr("swarmnode.peer.host.JOIN_S", 0.05)  # nobody is there to be waited for
    return Book(tmp_path)


def test_members_stay_in_the_book_with_their_note_while_nobody_is_online(book: Book) -> None:
    carols, other = book.invite(note="Carol", uses=1), book.invite(uses=2)
    book.came(ALICE, carols, home=HOME.public, name="carols-laptop")
    book.came(BOB, carols, home=HOME.public)
    book.came(CAROL, other, name="dora")
    picture = book.view().to_json()
    carol, dora = picture["members"]
    assert (carol["note"], carol["name"], carol["state"], carol["invite"]) == (
        "Carol",
        "carols-laptop",
        OFFLINE,
        carols,
    )
    assert {peer["peer"] for peer in carol["peers"]} == {ALICE, BOB} and carol["seen_at"] == LONG_AGO
    assert (dora["note"], dora["name"]) == ("", "dora") and not picture["online"]
    used = {invite["id"]: (invite["used"], invite["uses"]) for invite in picture["invites"]}
    assert used[carols] == (1, 1) and used[other] == (1, 2), "a home is one use"
    columns = {str(each.header): list(map(str, each.cells)) for each in invites_table(picture["invites"]).columns}
    assert columns["used"] == ["0", "1 of 1", "1 of 2"]
    rows = zip(*(map(str, column.cells) for column in members_table(picture).columns), strict=True)
    row = next(iter(rows))
    assert row[:3] == ("Carol (carols-laptop)", f"seen {ago(LONG_AGO)}", "volunteer")
    narrow = Console(width=80)
    with narrow.capture() as shown:
        narrow.print(members_table(picture))
    assert ALICE[-8:] in shown.get() and end(picture["members"][0]["expires_at"]) in shown.get()
    assert "group" not in shown.get(), "nobody has one"


@pytest.mark.parametrize("group", ["", "region-of-hamburg"])
@pytest.mark.parametrize("name", ["c", "carolinas-laptop-with-a-long-nam", "ein langer Name mit Leerzeichen"])
@pytest.mark.parametrize("note", ["", "Carol from the chess club in Hamburg-Altona and from next door"])
def test_no_table_of_members_cuts_a_name_or_an_id_in_80_columns(book: Book, note: str, name: str, group: str) -> None:
    invite = book.invite(note=note, group=group, life_s=3600.0)
    book.came(ALICE, invite, home=HOME.public, name=name)
    book.came(BOB, invite, home=HOME.public)
    picture = book.view().to_json()
    narrow = Console(width=80)
    with narrow.capture() as shown:
        narrow.print(members_table(picture), invites_table(picture["invites"]))
    text = shown.get()
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    for whole in (ALICE[-8:], BOB[-8:], invite[:8]):
        assert whole in text
    first = "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert "".join(name.split()) in "".join(first.split())


@pytest.mark.parametrize("who", ["Carol", "carols-laptop", ALICE, ALICE[-8:], BOB[-8:], HOME.public.hex()[:12]])
def test_revoking_a_member_by_any_of_its_names_ends_an_invite_that_was_for_it_alone(book: Book, who: str) -> None:
    invite = book.invite(note="Carol", uses=1)
    book.came(ALICE, invite, home=HOME.public, name="carols-laptop")
    book.came(BOB, invite, home=HOME.public)
    told = book.revoked(who)
    assert told["invites"] == [invite] and told["peers"] == []
    assert book.list.invites == (bytes.fromhex(invite),)
    listed = json.loads(invoke("members", str(book.file), "--json", home=book.file.parent / "home").stdout)
    assert [member["revoked"] for member in listed["members"]] == [True]


def test_revoking_a_member_of_a_shared_invite_ends_its_home_and_nobody_elses(book: Book) -> None:
    shared = book.invite(uses=0)
    book.came(ALICE, shared, home=HOME.public, name="alice")
    book.came(BOB, shared, home=ANOTHER_HOME.public, name="bob")
    told = book.revoked("alice")
    assert told["peers"] == [ALICE] and told["invites"] == []
    assert book.list.covers(ALICE) and not book.list.covers(BOB)
    assert home_digest(HOME.public) in book.list.peers and home_digest(ANOTHER_HOME.public) not in book.list.peers


def test_revoking_by_note_ends_an_invite_that_was_never_used(book: Book) -> None:
    invite = book.invite(note="Dora")
    assert book.revoked("Dora")["invites"] == [invite]
    assert_clear(invoke("revoke", str(book.file), "Dora", home=book.file.parent / "home"), 2, "neither a member")


def test_what_means_several_is_refused(book: Book) -> None:
    first, second = book.invite(note="friend"), book.invite(note="friend")
    view = book.view()
    with pytest.raises(UsageError, match="matches 2") as caught:
        view.find("friend")
    assert first[:8] in str(caught.value) and second[:8] in str(caught.value)
    book.came(ALICE, first, home=HOME.public, name="laptop")
    book.came(BOB, second, home=ANOTHER_HOME.public, name="laptop")
    with pytest.raises(UsageError, match="matches 2"):
        book.view().find("laptop")
    with pytest.raises(UsageError, match="neither a member"):
        book.view().find("")


def test_a_peer_that_nobody_has_seen_is_revoked_by_its_whole_id(book: Book) -> None:
    stranger = Identity.generate().peer_id
    assert book.revoked(stranger)["peers"] == [stranger]


def test_one_invite_cannot_fill_the_book(book: Book) -> None:
    flood, friends = book.invite(uses=0), book.invite()
    invented = [
        AdmittedPeer(f"invented {n}", flood, "", "client", "", 0, 1, 1) for n in range(MAX_PEERS_OF_AN_INVITE + 9)
    ]
    record_members(book.file, invented)
    book.came(ALICE, friends)
    kept = list(open_admitted_peers(book.file))
    assert len(kept) == MAX_PEERS_OF_AN_INVITE + 1 and kept[-1].peer == ALICE
    assert open_admitted_peers(book.file).path.stat().st_mode & 0o777 == 0o600


def test_the_file_is_written_only_for_news(book: Book) -> None:
    invite = book.invite()
    seen = AdmittedPeer(ALICE, invite, HOME.public.hex(), "client", "", 0, 100, 100, "alice")
    admitted = open_admitted_peers(book.file)
    assert admitted.record([seen])
    later = AdmittedPeer(ALICE, invite, "", "client", "", 0, 150, 100 + SEEN_STEP_S - 1)
    assert not admitted.record([later]), "the same peer, a little later, of which less is known now"
    assert admitted.record([AdmittedPeer(ALICE, invite, "", "client", "", 0, 150, 100 + SEEN_STEP_S)])
    (kept,) = admitted
    assert (kept.home, kept.name, kept.joined_at, kept.seen_at) == (HOME.public.hex(), "alice", 100, 100 + SEEN_STEP_S)


def test_roles_groups_and_ends_of_invites(book: Book) -> None:
    book.invite(role=Role.CLIENT, life_s=1.0, note="short")
    gone = book.invite(note="gone")
    book.revoked(gone)
    invites = book.view().to_json()["invites"]
    columns = {str(column.header): list(map(str, column.cells)) for column in invites_table(invites).columns}
    assert columns["role"] == ["volunteer", "client", "volunteer"]
    assert columns["until"][0] == "for ever" and columns["until"][2] == "revoked"
    assert end(int(time.time()) - 60) == "expired"


@pytest.mark.parametrize(
    ("in_s", "looks_like"), [(5 * HOUR_S, r"\d{4}-\d\d-\d\d \d\d:\d\d"), (100 * HOUR_S, r"\d{4}-\d\d-\d\d")]
)
def test_an_end_that_is_near_is_told_to_the_minute(in_s: int, looks_like: str) -> None:
    assert re.fullmatch(looks_like, end(int(time.time()) + in_s))


@pytest.mark.parametrize(
    ("past_s", "text"),
    [(5, "just now"), (330, "5 min ago"), (5 * HOUR_S + 5, "5 h ago"), (100 * HOUR_S, r"\d{4}-\d\d-\d\d")],
)
def test_times_past(past_s: int, text: str) -> None:
    assert re.fullmatch(text, ago(int(time.time()) - past_s))
