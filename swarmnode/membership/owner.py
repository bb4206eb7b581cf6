"""The owner's key: signs grants, invites and revocation lists; and QR codes of invites."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.net.identity import SigningKey, is_peer_id
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.invite import (
    MAX_GROUP_CHARS,
    MAX_USES,
    VERSION,
    Grant,
    OwnedInvite,
    Role,
    decode_invite,
    encode_invite,
    looks_like_invite,
    sign_grant,
)
from swarmnode.swarm.records.manifest import SERVE
from swarmnode.swarm.records.membership import nobody, open_list, sign_list
from swarmnode.swarm.storage.owner_files import IssuedInvite, IssuedInvites
from swarmnode.swarm.storage.swarmfile import Swarm

MIN_ID_CHARS = 6
HOST_NOTE = "the host's own machines"
QUIET_ZONE = 4  # light modules around a code, as the standard wants


class InviteQr:
    """QR code of one line of text, in upper case. Raises ValueError if the line is too long for a QR code."""

    def __init__(self, line: str) -> None:
        import segno  # here, since only commands that show invites need it

        self._code = segno.make_qr(line.upper(), error="l")

    @property
    def size(self) -> int:
        """Modules per side, with the quiet zone."""
        return len(self._code.matrix) + 2 * QUIET_ZONE

    def svg_path(self) -> str:
        """Return the dark modules as the `d` of an SVG path, in a square with sides of `size`."""
        rows = enumerate(self._code.matrix, QUIET_ZONE)
        return "".join(f"M{x} {y}h{width}v1h-{width}z" for y, row in rows for x, width in _dark_runs(row))

    def terminal(self) -> str:
        """Return the code in half-block characters, with half of the quiet zone, since terminals are narrow."""
        text = io.StringIO()
        self._code.terminal(text, compact=True, border=QUIET_ZONE // 2)
        return text.getvalue()


def _dark_runs(row: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield the (first column, length) of each run of dark modules."""
    x = QUIET_ZONE
    for dark, run in groupby(row):
        width = len(list(run))
        if dark:
            yield x, width
        x += width


@dataclass(frozen=True)
class InviteTerms:
    """Terms of an invite. `life_s` None: valid for ever; `uses`: the number of machines (homes), 0 any number. Raises UsageError if
    `uses` is out of bounds."""

    role: Role = Role.VOLUNTEER
    life_s: float | None = None
    uses: int = 0
    peer: PeerId = ""
    group: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.uses <= MAX_USES:
            raise UsageError(f"--uses is 1 to {MAX_USES}, or 0 for any number")


def roles_of(swarm: Swarm) -> list[Role]:
    """Return the roles that members can have in a swarm: no one trains in a swarm that serves."""
    serves = swarm.manifest is not None and swarm.manifest.mode == SERVE
    return [role for role in Role if role is not Role.TRAINER or not serves]


def make_grant(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> tuple[bytes, bytes]:
    """Return the signed grant and the private key of its invite; the grant is entered into the book, which is not saved.

    Raises UsageError if `owner` is not the swarm's owner, or if the role, the peer or the group of `terms` is not valid.
    """
    if terms.role not in roles_of(swarm):
        raise UsageError(
            f"{swarm.name} serves, so it has no trainers: invite a volunteer (to lend) or a client (to use it)"
        )
    if owner.public != swarm.owner:
        raise UsageError(f"this is not the key of the owner of {swarm.name}")
    if terms.peer and not is_peer_id(terms.peer):
        raise UsageError(
            f"{terms.peer!r} is not a peer id like 12D3KooW…; `swarmnode doctor --id` prints a machine's own"
        )
    if len(terms.group.encode()) > MAX_GROUP_CHARS or not terms.group.isprintable():
        raise UsageError(f"a group has up to {MAX_GROUP_CHARS} printable characters")
    now = int(time.time())
    expires_at = 0 if terms.life_s is None else now + max(1, int(terms.life_s))
    key = SigningKey.generate()
    grant = Grant(VERSION, swarm.id, key.public, terms.role, now, expires_at, terms.uses, terms.peer, terms.group)
    book.enter(grant, terms.note)
    return sign_grant(grant, owner), key.seed


def make_invite(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> str:
    """Return the line of text of a new invite, entered into the book, which is not saved. Raises UsageError as `make_grant`, or if
    the swarm is not private."""
    if not swarm.private:
        raise UsageError(f"{swarm.name} is not private: any peer may join with the invite that `create` printed")
    grant, secret = make_grant(swarm, owner, terms, book)
    address = (swarm.id, swarm.name, swarm.bootstraps, swarm.owner, swarm.signature, True)
    return encode_invite(OwnedInvite(*address, grant, secret))


def issue_invite(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> tuple[str, IssuedInvite]:
    """Return the line of text of a new invite and its entry in the book, which is saved. Raises UsageError as `make_invite`,
    LocalError if the book cannot be written."""
    line = make_invite(swarm, owner, terms, book)
    book.save()
    return line, book.guests[-1]


def shown_invite(
    swarm: Swarm, terms: InviteTerms, book: IssuedInvites, used: Callable[[bytes], int] = lambda _invite: 0
) -> str | None:
    """Return the line of the invite that was shown last, with the swarm's present addresses, if it still admits by these `terms`.

    None if there is no such invite, or if it has expired, was revoked, or is used up; `used` counts the uses of an invite's id.
    """
    try:
        invite = decode_invite(book.shown)
        if not isinstance(invite, OwnedInvite) or invite.swarm_id != swarm.id:
            return None
        grant = invite.opened_grant()
        revoked = open_list(book.revocations, swarm.id, swarm.owner).invites if book.revocations else ()
    except (UsageError, ProtocolError):
        return None
    life_s = grant.expires_at - grant.issued_at if grant.expires_at else None
    asked_s = None if terms.life_s is None else max(1, int(terms.life_s))
    of_terms = (grant.allows, grant.uses, life_s) == (terms.role, terms.uses, asked_s)
    is_over = grant.invite_id in revoked or 0 < grant.expires_at <= time.time()
    is_used_up = 0 < grant.uses <= used(grant.invite_id)
    good = of_terms and not is_over and not is_used_up
    return encode_invite(msgspec.structs.replace(invite, bootstraps=swarm.bootstraps)) if good else None


def show_invite(swarm: Swarm, owner: SigningKey, terms: InviteTerms, book: IssuedInvites) -> str:
    """Return the line of text of a new invite, and keep it in the book for `shown_invite`. Raises UsageError and LocalError as
    `issue_invite`."""
    book.shown = make_invite(swarm, owner, terms, book)
    book.save()
    return book.shown


def friends_invite(
    swarm: Swarm, owner: SigningKey | None, terms: InviteTerms, book: IssuedInvites, used: Callable[[bytes], int]
) -> str | None:
    """Return the line for a friend: of a private swarm the invite that was shown last while it is good, else a new one. None if
    that needs the owner's key. Raises UsageError and LocalError as `issue_invite`."""
    if not swarm.private:
        return swarm.invite
    last = shown_invite(swarm, terms, book, used)
    return last if last or owner is None else show_invite(swarm, owner, terms, book)


def with_host_grant(swarm: Swarm, owner: SigningKey, book: IssuedInvites) -> Swarm:
    """Return the private swarm with a grant in its file: the host's own machines may do everything. Raises UsageError as
    `make_grant`."""
    grant, secret = make_grant(swarm, owner, InviteTerms(max(roles_of(swarm)), note=HOST_NOTE), book)
    return replace(swarm, grant=grant, secret=secret)


def newest_list(swarm: Swarm, candidates: Sequence[bytes]) -> bytes:
    """Return the newest of the signed revocation lists; empty if there is none. Lists that the owner did not sign are ignored."""
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
    swarm: Swarm,
    owner: SigningKey,
    current: bytes,
    *,
    peers: Sequence[PeerId] = (),
    invites: Sequence[bytes] = (),
    homes: Sequence[bytes] = (),
) -> bytes:
    """Return the next revocation list, signed, with `peers`, `invites` and `homes` added.

    Raises UsageError if `owner` is not the swarm's owner or the list is full, ProtocolError if `current` is not the owner's.
    """
    if owner.public != swarm.owner:
        raise UsageError(f"this is not the key of the owner of {swarm.name}")
    revocations = open_list(current, swarm.id, swarm.owner) if current else nobody(swarm.id)
    return sign_list(revocations.extended(time.time(), peers=peers, invites=invites, homes=homes), owner)


def find_invite(text: str, swarm: Swarm, book: IssuedInvites) -> bytes | None:
    """Return the id of the invite that `text` names: the line of an invite, its id, or the beginning of the id. None if it names
    none.

    Raises UsageError if the line is no invite by this swarm's owner, or if several ids begin with `text`.
    """
    if looks_like_invite(text):
        invite = decode_invite(text)
        if invite.swarm_id != swarm.id or not isinstance(invite, OwnedInvite) or not invite.grant:
            raise UsageError(f"this is not an invite that the owner of {swarm.name} gave out")
        return invite.opened_grant().invite_id
    found = {guest.invite for guest in book.guests if guest.invite.startswith(text.lower())}
    if len(text) < MIN_ID_CHARS or not found:
        return None
    if len(found) > 1:
        raise UsageError(f"{text} is the beginning of {len(found)} invites; give more of it")
    return bytes.fromhex(found.pop())
