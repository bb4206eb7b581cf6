"""Access control: checks every link and every call of the table against the swarm's membership, and spreads the owner's
revocations.

a link opens          both sides show certificates; a peer without one gets REFUSED and nothing else.
a table is called     the caller must have passed this gate before, over a link of the membership protocol.
the owner revokes     the list goes over every live link and into the table; links of peers on the list are cut.
a membership expires  the links of that peer are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Hello, Revocations
from swarmnode.errors import ErrorCode, LocalError, NotAdmitted, PeerError, PeerRefused, ProtocolError, SwarmnodeError
from swarmnode.files import lock_in_turn
from swarmnode.links.link import Link
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.link_statistics import protocol_name
from swarmnode.net.identity import Identity, SigningKey
from swarmnode.net.interfaces import Network, PeerId, Stream
from swarmnode.net.network_config import Gate, GuardedLink
from swarmnode.net.tasks import OnCrash, Tasks
from swarmnode.swarm.peers.record_validation import NOTICE_LIFE_S, accept_notices, due, notice_keys
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.invite import Role, admit_peer, open_certificate, open_grant
from swarmnode.swarm.records.membership import CLOCKED, EXPIRED, Membership
from swarmnode.swarm.storage.owner_files import AdmittedPeer
from swarmnode.swarm.storage.remembered import MembershipFile
from swarmnode.swarm.storage.swarmfile import Swarm

log = logging.getLogger(__name__)

MEMBERSHIP_PROTOCOL = "/swarmnode/membership/1"
LOOK_S = 10.0
TABLE_TIMEOUT_S = 10.0

OPENS = {"train": Role.VOLUNTEER, "spot-check": Role.VOLUNTEER}


"""Least role that may open a link of a protocol, by the protocol's name; CLIENT for the others."""

ANSWERS = {
    "membership": Role.CLIENT,
    "session": Role.VOLUNTEER,
    "audit": Role.VOLUNTEER,
    "train": Role.VOLUNTEER,
    "tune": Role.VOLUNTEER,
    "cotune": Role.CLIENT,
    "spot-check": Role.VOLUNTEER,
    "state": Role.VOLUNTEER,
    "probe": Role.VOLUNTEER,
}
"""Least role that may answer a link of a protocol; BOOTSTRAP for the others."""


@dataclass(eq=False)
class AccessControl(Gate):
    """Gate of a swarm that has an owner. It exists before the network, since it guards the network's table; `start` hands the
    network over.

    `on_look` is called after each look at the links, when the links of former members have been cut.
    """

    membership: Membership
    file: MembershipFile
    _: KW_ONLY
    clock: Callable[[], float] = time.time
    check_interval_s: float = LOOK_S
    on_crash: OnCrash | None = None

    def __post_init__(self) -> None:
        self.guards_table = self.membership.private
        self.on_look: Callable[[], None] = lambda: None
        self.turned_away: PeerRefused | None = None  # the refusal of the last peer called, if it refused
        self._doubted = False
        self._links: dict[GuardedLink, None] = {}  # the oldest first
        self._introductions: dict[PeerId, asyncio.Task[None]] = {}
        self._network: Network | None = None
        self._hello: Hello | None = None
        self._link_config: LinkConfig | None = None
        self._check_now = asyncio.Event()
        self._tasks = Tasks("access control", on_crash=self.on_crash)
        self.file.load(self.membership, self.clock())

    def __repr__(self) -> str:
        return f"<AccessControl of {self.membership!r}, {len(self._links)} links>"

    async def start(self, network: Network, hello: Hello, link_config: LinkConfig) -> None:
        """Start to answer introductions and to watch memberships."""
        self._network, self._hello, self._link_config = network, hello, link_config
        await network.serve(MEMBERSHIP_PROTOCOL, self._answer)
        self._tasks.spawn(self._watch(), "watch")

    async def close(self) -> None:
        """Stop watching and save the memberships. Links stay open: their makers close them."""
        await self._tasks.close()
        await asyncio.to_thread(self.file.save, self.membership)

    # -- links

    def greeting(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, proof=self.membership.certificate)

    def admit(self, peer: PeerId, protocol: str, theirs: Hello, *, answers: bool) -> None:
        self.membership.admit(peer, theirs.proof, self.clock())
        name = protocol_name(protocol)
        least = ANSWERS.get(name, Role.BOOTSTRAP) if answers else OPENS.get(name, Role.CLIENT)
        role = self.membership.role(peer)
        if role < least:
            does = "answers" if answers else "opens"
            text = f"it is a {role.name.lower()}, and {does} links of {name}"
            raise ProtocolError(text, code=ErrorCode.REFUSED, peer=peer)

    def opened(self, link: GuardedLink) -> None:
        self._links[link] = None
        if self.membership.revocations.number:
            link.send(Revocations(self.membership.revocations.number))

    def closed(self, link: GuardedLink) -> None:
        self._links.pop(link, None)

    def accept_revocations(self, link: GuardedLink, number: int, revocations: bytes) -> None:
        ours = self.membership.revocations.number
        if revocations:
            if self.membership.adopt_list(revocations):
                self._spread(link)
        elif number != ours and not link.closed:
            older = number < ours
            link.send(Revocations(ours, self.membership.revocations_bytes if older else b""))

    def may_feed(self, peer: PeerId) -> bool:
        return self.membership.role(peer) >= Role.TRAINER

    def may_lead(self, peer: PeerId, stages: Iterable[PeerId]) -> bool:
        """Return whether the peer may lead a training: a trainer's node may; if none of the stages is one, a volunteer's, else the
        training would stand still."""
        least = Role.TRAINER if any(map(self.may_feed, stages)) else Role.VOLUNTEER
        return self.membership.role(peer) >= least

    def vouch(self, announcement: Announcement, certificate: bytes) -> None:
        """Check that the author of the announcement may announce it. Raises ProtocolError if not; see `Membership.vouch`."""
        self.membership.vouch(announcement, certificate, self.clock())

    def admitted(self, names: Mapping[PeerId, str]) -> list[AdmittedPeer]:
        """Return the members by invite that this peer knows of; `names` are those of announced peers. Peers that are announced or
        linked are seen now, others when they were admitted."""
        now = self.clock()
        here = {*names, *self.linked}
        return [
            AdmittedPeer(
                member.peer,
                member.invite.hex(),
                member.home.hex(),
                member.role.name.lower(),
                member.group,
                member.expires_at,
                member.admitted_at,
                int(now) if member.peer in here else member.admitted_at,
                names.get(member.peer, ""),
            )
            for member in self.membership.members(now)
        ]

    @property
    def linked(self) -> set[PeerId]:
        """Peers with an open link to this peer."""
        return {link.peer for link in self._links}

    def group(self, peer: PeerId) -> str:
        """Return the group in the peer's certificate; empty if it has none or showed no certificate."""
        member = self.membership.member(peer)
        return "" if member is None else member.group

    def check_welcome(
        self, own: PeerId, name: str, needs: Role = Role.CLIENT, *, alone: bool = True, expiry_is_final: bool = False
    ) -> None:
        """Raise NotAdmitted if the swarm does not admit this peer, or not for the role `needs`.

        `own` is this peer's id and `name` the swarm's name. A refusal by the last peer called counts only if this peer is `alone`,
        that is, if no other peer speaks with it. An expiry by this machine's clock alone is logged, and counts once a peer refuses
        too, or at once if `expiry_is_final`: the clock may be wrong.
        """
        objection, refused = self.membership.objection_to_us(own, self.clock()), self.turned_away if alone else None
        is_final = objection is EXPIRED and (expiry_is_final or refused is not None)
        if objection in CLOCKED and not is_final:
            self._doubt(name)
            objection = None
        elif objection is None:
            self._doubted = False
        if objection is None and refused is not None and refused.code is ErrorCode.REFUSED:
            objection = "its membership was revoked, or its invite used up by others"
        if objection is not None:
            raise NotAdmitted(f"the swarm {name} does not admit this peer: {objection}; ask its owner for a new invite")
        role = self.membership.own_role()
        if role < needs:
            wanted = needs.name.lower()
            raise NotAdmitted(
                f"your invite to {name} is for a {role.name.lower()}, and this needs one for a {wanted}: ask its owner for it "
                f"(swarmnode invite SWARM --role {wanted})"
            )

    def _doubt(self, name: str) -> None:
        """Log once that the membership is not valid at the time that this machine's clock shows."""
        own = self.membership.own()
        if self._doubted or own is None:
            return
        self._doubted = True
        ends = f" to {_date(own.expires_at)}" if own.expires_at else ""
        log.warning(
            "the membership in %s is valid from %s%s, and this machine's clock shows %s; this node waits until the clock is right, "
            "or another machine refuses it",
            name,
            _date(own.admitted_at),
            ends,
            _date(self.clock()),
        )

    def _spread(self, source: GuardedLink | None = None) -> None:
        """Apply a newer revocation list, and send it to all links but `source`."""
        log.info("the owner's revocation list is now %r", self.membership.revocations)
        for link in [link for link in self._links if link is not source]:
            link.send(Revocations(self.membership.revocations.number, self.membership.revocations_bytes))
        self._cut()  # last, so that peers on the list receive it too
        self._check_now.set()

    def _cut(self) -> None:
        """Cut the links to peers that are no members any more."""
        now = self.clock()
        if self._network is not None:
            with contextlib.suppress(ProtocolError):  # the own clock may have been wrong at the start
                self.membership.admit(self._network.peer_id, self.membership.certificate, now)
        for link in list(self._links):
            if not self.membership.stands(link.peer, now):
                log.info("peer %s is not a member any more", link.peer)
                link.cut(ErrorCode.REFUSED)
        self.on_look()

    # -- the table

    def admits(self, peer: PeerId) -> bool:
        return self.membership.stands(peer, self.clock())

    async def introduce(self, peer: PeerId, *, anew: bool = False) -> None:
        task = self._introductions.get(peer)
        if task is None or (anew and task.done()):
            task = self._introductions[peer] = self._tasks.spawn(
                self._call_upon(peer), f"introduce {peer}", awaited=True
            )
        await asyncio.shield(task)  # a caller that gives up must not end another's wait

    async def _call_upon(self, peer: PeerId) -> None:
        assert self._network is not None and self._hello is not None and self._link_config is not None
        try:
            link = await Link.connect(self._network, peer, MEMBERSHIP_PROTOCOL, self._hello, config=self._link_config)
        except BaseException as error:
            self._introductions.pop(peer, None)  # the next call tries again
            if isinstance(error, PeerRefused) and error.code in (ErrorCode.REFUSED, ErrorCode.BUSY):
                self.turned_away = error
            raise
        self.turned_away = None
        self._tasks.spawn(self._listen(link), f"membership of {peer}")

    async def _answer(self, stream: Stream) -> None:
        assert self._hello is not None and self._link_config is not None
        try:
            link = await Link.accept(stream, self._hello, config=self._link_config)
        except ProtocolError as error:
            log.info("not admitted: %s", error)
            return
        await self._listen(link)

    async def _listen(self, link: Link) -> None:
        """Keep the link: new revocation lists arrive over it at once."""
        try:
            await link.run(_nothing_else)
        except PeerError as error:
            log.debug("%s", error)

    # -- watch

    async def _watch(self) -> None:
        while True:
            self._check_now.clear()
            await self.exchange()
            self._cut()
            await asyncio.to_thread(self.file.save, self.membership)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), self.check_interval_s)

    async def exchange(self) -> None:
        """Read the membership notices in the table, and store those that it lacks. Failures are logged and retried at the next
        look."""
        assert self._network is not None
        table = self._network.dht
        try:
            found = await asyncio.wait_for(table.get(notice_keys(self.membership.swarm)), TABLE_TIMEOUT_S)
            now = self.clock()
            if accept_notices(self.membership, found, now):
                self._spread()
            for notice in due(self.membership, found, now):
                storing = table.store(notice.key, notice.subkey, notice.value, expires_at=now + NOTICE_LIFE_S)
                await asyncio.wait_for(storing, TABLE_TIMEOUT_S)
        except (SwarmnodeError, asyncio.TimeoutError) as error:
            log.debug("cannot exchange notices: %s", error or "no answer")

    async def publish(self, revocations: bytes, peers: Iterable[PeerId]) -> int:
        """Apply the owner's next revocation list, send it to `peers` and to the table, and return the number of peers with a link.

        Raises ProtocolError if the list is not the owner's.
        """
        await asyncio.gather(*map(self.introduce, peers), return_exceptions=True)
        if self.membership.adopt_list(revocations):
            self._spread()
        links = list(self._links)
        await asyncio.gather(*(link.drain() for link in links), return_exceptions=True)
        await self.exchange()
        return len({link.peer for link in links})


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _nothing_else(_frame: Frame, body: Body) -> None:
    raise ProtocolError(f"a {type(body).__name__} came on a link of the membership protocol")


def access_control_of(
    swarm: Swarm, peer: PeerId, home: Path, *, needs: Role, clock: Callable[[], float], on_crash: OnCrash | None = None
) -> AccessControl | None:
    """Return the access control of a peer in a swarm that has an owner; None if it has none, since then every peer is admitted.

    `clock` gives unix time. Raises NotAdmitted if the invite does not make this peer a member, or not in the role that it `needs`.
    A node whose invite is not valid at the time of this machine's clock starts, and waits: the clock may be wrong.
    """
    if not swarm.owner:
        return None
    if swarm.private and not swarm.grant:
        raise NotAdmitted(f"the swarm {swarm.name} is private: ask its owner for an invite of your own")
    file = MembershipFile(home / "membership" / f"{swarm.id.hex()[:16]}-{peer[-8:]}.json")
    certificate = b"" if not swarm.grant else _certificate(swarm, peer, load_home_key(home), file.certificate, clock())
    membership = Membership(swarm.id, swarm.owner, private=swarm.private, certificate=certificate)
    access_control = AccessControl(membership, file, clock=clock, on_crash=on_crash)
    if swarm.revocations:
        with contextlib.suppress(ProtocolError):  # a list that is not the owner's is ignored
            membership.adopt_list(swarm.revocations)
    access_control.check_welcome(peer, swarm.name, needs, expiry_is_final=needs is Role.CLIENT)
    with contextlib.suppress(ProtocolError):  # a node whose clock is wrong is admitted later
        membership.admit(peer, certificate, clock())  # this peer is a member in its own table, too
    return access_control


def load_home_key(home: Path) -> Identity:
    """Return the key of a home folder, which makes its programs one user of an invite; a new one if it has none yet. Raises
    LocalError if it cannot be read or written."""
    try:
        with lock_in_turn(home / "home.lock"):
            return Identity.load_or_create(home / "home.key")
    except OSError as error:
        raise LocalError(f"cannot keep state in {home}: {error.strerror or error}") from error


def is_first_use(swarm: Swarm, home: Path) -> bool:
    """Return whether joining would count a use of the swarm's invite: its uses are limited, and no program of `home` has joined by
    it. Raises ProtocolError if the invite is not the owner's."""
    if not swarm.private or not swarm.grant:
        return False
    grant = open_grant(swarm.grant, swarm.id, swarm.owner)
    used = False
    for path in (home / "membership").glob(f"{swarm.id.hex()[:16]}-*.json"):
        with contextlib.suppress(ProtocolError):
            used |= open_certificate(MembershipFile(path).certificate, swarm.id, swarm.owner).invite == grant.invite_id
    return bool(grant.uses) and not used


def _certificate(swarm: Swarm, peer: PeerId, home: SigningKey, earlier: bytes, now: float) -> bytes:
    """Return the certificate of an earlier run if it is of the same invite and home, else a new one. Raises NotAdmitted if the
    invite is not valid for this peer."""
    new = admit_peer(swarm.grant, SigningKey(swarm.secret), swarm.id, peer, now, home=home)
    try:
        member = open_certificate(new, swarm.id, swarm.owner)
        if earlier:
            known = open_certificate(earlier, swarm.id, swarm.owner)
            if (known.invite, known.home) == (member.invite, member.home):
                return earlier
    except ProtocolError as error:
        raise NotAdmitted(f"this invite to {swarm.name} does not admit peer {peer}: {error}") from None
    return new
