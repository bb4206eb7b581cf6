"""Owner's key: signs the swarm, invites, and revokes."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.net.identity import SigningKey, is_peer_id
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.certificate import MAX_GROUP_CHARS, MAX_USES, VERSION, Grant, Role, sign_grant
from swarmnode.swarm.records.invite import OwnedInvite, decode_invite, encode_invite, looks_like_invite
from swarmnode.swarm.records.revocation import nobody, open_list, sign_list
from swarmnode.swarm.storage.issued_invites import IssuedInvite, IssuedInvites
from swarmnode.swarm.storage.swarmfile import Swarm

MIN_ID_CHARS = 6
HOST_NOTE = "the host's own machines"
QUIET_ZONE = 4  # modules round it, as the standard wants


class InviteQr:
    """Of one line of text. Raises ValueError where it is longer than a QR code can be."""

    def __init__(self, line: str) -> None:
        import segno  # of who shows invites alone

        self._code = segno.make_qr(line.upper(), error="l")

    def __repr__(self) -> str:
        return f"<InviteQr of {self.size} modules a side>"

    @property
    def size(self) -> int:
        """Modules a side, with the quiet zone."""
        return len(self._code.matrix) + 2 * QUIET_ZONE

    def svg_path(self) -> str:
        """The dark modules as the `d` of an SVG path, in a square of `size`."""
        rows = enumerate(self._code.matrix, QUIET_ZONE)
        return "".join(f"M{x} {y}h{width}v1h-{width}z" for y, row in rows for x, width in _dark_runs(row))

    def terminal(self) -> str:
        """As half blocks, with half of the quiet zone, since terminals are narrow."""
        text = io.StringIO()
        self._code.terminal(text, compact=True, border=QUIET_ZONE // 2)
        return text.getvalue()


def _dark_runs(row: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(where it begins, how long it is) of each."""
    x = QUIET_ZONE
    for dark, run in groupby(row):
        width = len(list(run))
        if dark:
            yield x, width
        x += width


@dataclass(frozen=True)
class InviteTerms:
    """What an invite is good for. `life_s` None is for ever, `uses` 0 for any number of peers. Raises UsageError."""

    role: Role = Role.VOLUNTEER
    life_s: float | None = None
    uses: int = 0
    peer: PeerId = ""
    group: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.uses <= MAX_USES:
            raise UsageError(f"--uses is 1 to {MAX_USES}, or 0 for any number")


def make_grant(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> tuple[bytes, bytes]:
    """(the signed grant, the private key of its invite), entered into the book. Raises UsageError."""
    if owner.public != swarm.owner:
        raise UsageError(f"this is not the key of the owner of {swarm.name}")
    if terms.peer and not is_peer_id(terms.peer):
        raise UsageError(f"{terms.peer!r} is not a peer id like 12D3KooW…; `swarmnode id` prints a machine's own")
    if len(terms.group.encode()) > MAX_GROUP_CHARS or not terms.group.isprintable():
        raise UsageError(f"a group has up to {MAX_GROUP_CHARS} printable characters")
    now = int(time.time())
    expires_at = 0 if terms.life_s is None else now + max(1, int(terms.life_s))
    key = SigningKey.generate()
    grant = Grant(VERSION, swarm.id, key.public, terms.role, now, expires_at, terms.uses, terms.peer, terms.group)
    book.enter(grant, terms.note)
    return sign_grant(grant, owner), key.seed


def make_invite(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> str:
    """The line of text to hand out. Raises UsageError."""
    if not swarm.private:
        raise UsageError(f"{swarm.name} is not private: everybody may join with the invite that `create` printed")
    grant, secret = make_grant(swarm, owner, terms, book)
    address = (swarm.id, swarm.name, swarm.bootstraps, swarm.owner, swarm.signature, True)
    return encode_invite(OwnedInvite(*address, grant, secret))


def issue_invite(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> tuple[str, IssuedInvite]:
    """(the line of text to hand out, what the book, which is written, has of it). Raises UsageError, LocalError."""
    line = make_invite(swarm, owner, terms, book)
    book.save()
    return line, book.guests[-1]


def with_host_grant(swarm: Swarm, owner: SigningKey, book: IssuedInvites) -> Swarm:
    """The private swarm with a grant for whoever has its file: the host's own machines may do everything."""
    grant, secret = make_grant(swarm, owner, InviteTerms(Role.TRAINER, note=HOST_NOTE), book)
    return replace(swarm, grant=grant, secret=secret)


def newest_list(swarm: Swarm, candidates: Sequence[bytes]) -> bytes:
    """The newest of some signed revocation lists; empty where there is none. Those that are not the owner's are passed over."""
    newest = nobody(swarm.id)
    signed = b""
    for raw in filter(None, candidates):
        try:
            revocations = open_list(raw, swarm.id, swarm.owner)
        except ProtocolError:
            continue
        if revocations.number > newest.number:
            newest, signed = revocations, raw
    return signed


def revoke(
    swarm: Swarm, owner: SigningKey, current: bytes, *, peers: Sequence[PeerId] = (), invites: Sequence[bytes] = ()
) -> bytes:
    """The next revocation list, signed, with these on it. Raises UsageError."""
    if owner.public != swarm.owner:
        raise UsageError(f"this is not the key of the owner of {swarm.name}")
    revocations = open_list(current, swarm.id, swarm.owner) if current else nobody(swarm.id)
    return sign_list(revocations.extended(time.time(), peers=peers, invites=invites), owner)


def find_invite(text: str, swarm: Swarm, book: IssuedInvites) -> bytes | None:
    """The id of the invite that a line, an id or the beginning of one names; None where it names none.

    Raises UsageError where it is another swarm's, or the beginning of several.
    """
    if looks_like_invite(text):
        invite = decode_invite(text)
        if invite.swarm_id != swarm.id or not isinstance(invite, OwnedInvite) or not invite.grant:
            raise UsageError(f"this is not an invite that {swarm.name}'s owner gave to somebody")
        return invite.opened_grant().invite_id
    found = {guest.invite for guest in book.guests if guest.invite.startswith(text.lower())}
    if len(text) < MIN_ID_CHARS or not found:
        return None
    if len(found) > 1:
        raise UsageError(f"{text} is the beginning of {len(found)} invites; give more of it")
    return bytes.fromhex(found.pop())
