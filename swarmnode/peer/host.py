"""Host: a peer's presence in a swarm, be it a worker, a bootstrap peer or a client; and the calls to bootstrap peers.

It has an identity, the network, the directory, and the manifest. It keeps trying to reach the swarm until it succeeds.

Newcomer: fetches the swarm's manifest for a peer that has only an invite.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.errors import (
    ErrorCode,
    LocalError,
    NetworkDown,
    PeerError,
    PeerLost,
    PeerRefused,
    ProtocolError,
    UsageError,
)
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.pacing import RateLimiter
from swarmnode.links.switchboard import Switchboard
from swarmnode.membership.access_control import access_control_of
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.addressing.addresses import is_loopback, peer_of, without_peer
from swarmnode.net.clock import Clock, SteadyTime
from swarmnode.net.identity import Identity, IdentitySlot, verify
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.network_config import OPEN_GATE
from swarmnode.net.tasks import Supervisor, Tasks, cancel_and_wait
from swarmnode.peer.completed_work import CompletedWork, HomePeers
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.host_config import HostConfig, network_config
from swarmnode.peer.paths import ObservedLatency, Paths
from swarmnode.peer.questions import ask
from swarmnode.plan.findings import Kind
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import MAX_ADDRESSES, MAX_NAME_CHARS, Announcement, Introduction, State
from swarmnode.swarm.records.invite import Role
from swarmnode.swarm.records.manifest import MAX_MANIFEST_BYTES, check_products, swarm_id
from swarmnode.swarm.storage.owner_files import issued_invites_path, record_members
from swarmnode.swarm.storage.remembered import KnownPeers, ManifestCache, own_name
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.version import __version__

if TYPE_CHECKING:
    from swarmnode.membership.access_control import AccessControl
    from swarmnode.net.addressing.lan import LanDiscovery


MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
NEXT_PEER_S = 0.2  # interval after which one more peer is asked, whether or not earlier ones have answered
TIMEOUT_S = 20.0


async def fetch_manifest(
    network: Network,
    peers: Sequence[PeerId],
    hello: Hello,
    config: LinkConfig,
    *,
    drop: Callable[[PeerId, str], None] = lambda _peer, _reason: None,
    timeout_s: float = TIMEOUT_S,
) -> bytes:
    """Return the swarm's manifest from the first of `peers` that gives the right one.

    `drop` is called with each peer that breaks the protocol (a wrong manifest, for example) and the reason. Raises PeerError if no
    peer gives the manifest within `timeout_s` seconds.
    """
    board = Switchboard(network, MANIFEST_PROTOCOL, hello, replace(config, max_payload_bytes=MAX_MANIFEST_BYTES))
    failure: PeerError = PeerRefused("no peer is known that could have the manifest", code=ErrorCode.NOT_FOUND)
    questions = [
        asyncio.ensure_future(_ask(board, peer, hello.swarm, number * NEXT_PEER_S)) for number, peer in enumerate(peers)
    ]
    try:
        for question in asyncio.as_completed(questions, timeout=timeout_s):
            try:
                return await question
            except ProtocolError as error:
                failure = error
                if error.peer is not None:
                    drop(error.peer, str(error))
            except PeerError as error:
                failure = error
        raise failure
    except asyncio.TimeoutError:
        raise PeerLost(f"no peer gave the manifest within {timeout_s:.0f} s") from failure
    finally:
        await cancel_and_wait(*questions)
        await board.close()


async def _ask(board: Switchboard, peer: PeerId, swarm: bytes, delay_s: float) -> bytes:
    await asyncio.sleep(delay_s)
    try:
        async for frame, body in ask(board, peer, GetManifest()):
            if isinstance(body, ManifestReply):
                if swarm_id(frame.payload) != swarm:
                    raise ProtocolError("it gave a manifest that is not the swarm's", peer=peer)
                return bytes(frame.payload)
    except NetworkDown as error:
        raise PeerLost(str(error), peer=peer) from error
    raise PeerRefused(f"peer {peer} has no manifest", code=ErrorCode.NOT_FOUND, peer=peer)


log = logging.getLogger(__name__)

JOIN_S = 15.0  # for the first answer of a peer

NEEDS = {"client": Role.CLIENT, "bootstrap": Role.BOOTSTRAP}  # in a private swarm; VOLUNTEER for other roles
FIRST_S = 2.0
MAX_PAUSE_S = 16.0
CALM = 2  # at most this many doublings of the pause while all bootstrap peers are connected
MAX_TOLD_BELOW = 64  # nodes whose products are too imprecise, each told once
CALLERS = 64  # largest swarm whose peers call at this pace


def pause_s(failures: int, crowd: float) -> float:
    """Return the seconds before the next call to bootstrap peers, after `failures` failed ones in a row, in a swarm of `crowd`
    peers."""
    pause = FIRST_S * 2.0 ** min(failures, 16)
    return min(MAX_PAUSE_S, pause) * max(1.0, crowd / CALLERS)


def unconnected(bootstraps: Sequence[str], connected: Collection[PeerId]) -> list[str]:
    """Return the bootstrap peers (multiaddrs with /p2p/) that are not connected."""
    return [bootstrap for bootstrap in bootstraps if peer_of(bootstrap) not in connected]


async def dial_bootstraps(
    bootstraps: Sequence[str],
    connected: Callable[[], Awaitable[Collection[PeerId]]],
    call: Callable[[Sequence[str]], Awaitable[bool]],
    crowd: Callable[[], float],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Keep connected with the bootstrap peers, for ever: look at intervals for unconnected ones and `call` them.

    `call` returns whether a peer answered at one of the addresses; `crowd` returns the size of the swarm.
    """
    failures = calm = 0
    while True:
        await sleep(pause_s(failures or calm, crowd()))
        missing = unconnected(bootstraps, await connected())
        calm = 0 if missing else min(calm + 1, CALM)
        failures = failures + 1 if missing and not await call(missing) else 0


_of_this_process: set[PeerId] = set()
"""Peers that this process has started and not closed."""


@dataclass(eq=False)
class Host:
    """A peer of a swarm, made by `join`. `swarm` has its manifest once `manifest()` has returned."""

    swarm: Swarm
    config: HostConfig
    network: Network
    slot: IdentitySlot
    identity: Identity
    access_control: AccessControl | None
    supervisor: Supervisor
    clock: Clock

    def __post_init__(self) -> None:
        self.peer_id = self.network.peer_id
        self.name = (self.config.name or own_name(self.config.home))[:MAX_NAME_CHARS]  # that others see
        self.decisions = DecisionLog(self.clock.unix)
        self.hello = Hello(VERSION, self.swarm.id, f"swarmnode/{__version__}")
        self.paths = Paths(
            self.network.peer_id, lambda peer: self.directory.peers().get(peer), clock=self.clock.monotonic
        )
        self.observed_latency = ObservedLatency(clock=self.clock.monotonic)
        self.completed = CompletedWork(HomePeers(self.config.home).__contains__)
        self.weight_of: Callable[[PeerId], float] = lambda _client: 1.0  # a client's share of this node's device
        rates_bps = self.config.max_upload_bps, self.config.max_download_bps
        upload, download = (RateLimiter(bps, clock=self.clock.monotonic) if bps else None for bps in rates_bps)
        self.link_config = LinkConfig(
            addresses_of=lambda peer: self.directory.addresses_of(peer),
            rate_limiter=upload,
            download_limiter=download,
            link_statistics=self.paths.link_statistics,
            gate=self.access_control or OPEN_GATE,
            supervisor=self.supervisor,
            clock=self.clock.stopwatch,
        )
        kept = f"{self.swarm.id.hex()[:16]}.json"
        self._known_peers = KnownPeers(self.config.home / "peers" / kept)
        self.standing = Findings(self.config.home / "standing" / kept, self.clock.unix, self.decisions)
        self.directory = Directory(
            self.network,
            self.swarm.id,
            verify=verify,
            sign=None if self.config.looks_on else self.identity.sign,
            known_peers=self._known_peers,
            vouch=None if self.access_control is None else self.access_control.vouch,
            certificate=b"" if self.access_control is None else self.access_control.membership.certificate,
            check=self._check_announcement,
            now=self.clock.unix,
            on_suspected=lambda peer, reason: self.standing.add(peer, Kind.FAILED, reason),
            on_crash=self.supervisor.ends_peer,
        )
        self._reported_below: set[PeerId] = set()
        self._lan: LanDiscovery | None = None
        self._tasks = Tasks("host", on_crash=self.supervisor.ends_peer)
        self.joined = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Host of {self.peer_id} in {self.swarm.name}, {'joined' if self.joined.is_set() else 'alone'}>"

    @classmethod
    async def join(
        cls,
        swarm: Swarm,
        config: HostConfig,
        *,
        role: str = "node",
        identity: Identity | None = None,
        platform: Platform = MACHINE,
    ) -> Host:
        """Start the network and begin to look for the swarm.

        Args:
            swarm: The swarm; its manifest may still be missing.
            config: Settings of this peer's presence.
            role: Name of the identity's file in the home folder. In a private swarm "client" and "bootstrap" need an invite for
                that
                role, all others need one for a volunteer.
            identity: The peer's identity. Default: the one kept under `role`; a client of a public swarm gets a new one each time.
            platform: Network, clock and executors.

        Raises:
            LocalError: This machine cannot, for example because a port is taken.
            NotAdmitted: The swarm does not admit this peer.
        """
        slot = IdentitySlot(config.home, role)
        try:
            if identity is not None:
                identity.save(slot.path)
            elif config.looks_on and not swarm.private:
                identity = Identity.generate()
                identity.save(slot.path)
            else:
                identity = Identity.load_or_create(slot.path)
            needs = NEEDS.get(role, Role.VOLUNTEER)
            time = platform.clock.steady_time()
            clock = replace(platform.clock, unix=time)
            supervisor = Supervisor(clock.monotonic)
            access_control = access_control_of(
                swarm, identity.peer_id, config.home, needs=needs, clock=clock.unix, on_crash=supervisor.ends_peer
            )
            wanted = network_config(swarm, config, slot.path, access_control, needs=needs, clock=clock)
            network = await platform.start_network(replace(wanted, supervisor=supervisor))
        except BaseException:
            slot.release()
            raise
        self = cls(swarm, config, network, slot, identity, access_control, supervisor, clock)
        _of_this_process.add(self.peer_id)
        try:
            await self._enter(time)
        except BaseException:
            await self.close()
            raise
        return self

    async def _enter(self, time: SteadyTime) -> None:
        if self.access_control is not None:
            self.access_control.on_look = self._expel
            await self.access_control.start(self.network, self.hello, self.link_config)
        if self.config.lan:
            from swarmnode.net.addressing.lan import LanDiscovery

            self._lan = await LanDiscovery.start(self.swarm.id, self.peer_id, await self.network.addresses())
        if (bootstraps := self._bootstraps()) and await self._call(bootstraps):
            self.joined.set()
        await self.directory.start()
        self._tasks.spawn(self._stay_joined(), "keep joined")
        self._tasks.spawn(self._watch_clock(time), "watch the clock")
        if not self.config.looks_on:
            calls = dial_bootstraps(self._named_bootstraps(), self._connected, self._call, lambda: self.directory.crowd)
            self._tasks.spawn(calls, "dial bootstraps")
        self._tasks.spawn(self._tell_paths(), "tell paths")
        if self.swarm.file is not None and self.access_control is not None:
            self._tasks.spawn(self._record_members(self.swarm.file, self.access_control), "keep the owner's book")

    def _expel(self) -> None:
        """Drop peers from the directory that are no members any more."""
        assert self.access_control is not None
        others = [peer for peer in self._others() if not self.access_control.admits(peer)]
        if others:
            self.directory.expel(others)

    async def _record_members(self, file: Path, access_control: AccessControl) -> None:
        """Note members in the owner's book beside the .swarm file, if the owner's list of invites is there. A failure, such as a
        full disk, is logged once, and tried again."""
        is_logged = False
        while True:
            await asyncio.sleep(self.config.book_s)
            try:
                if issued_invites_path(file).is_file():
                    names = {peer: announced.name for peer, announced in self.directory.peers().items()}
                    await asyncio.to_thread(record_members, file, access_control.admitted(names))
                is_logged = False
            except (LocalError, UsageError) as error:
                if not is_logged:
                    log.warning("members of %s are not noted at the moment: %s", self.swarm.name, error)
                is_logged = True

    def _bootstraps(self) -> list[str]:
        """Return the addresses at which the swarm may be found: the user's, the invite's, the last good ones, the LAN's."""
        near = self._lan.addresses() if self._lan else []
        return self._of_others([*self._named_bootstraps(), *self._known_peers.addresses(), *near])

    def _named_bootstraps(self) -> list[str]:
        """Return the addresses of other peers that the user and the invite name, each once."""
        return self._of_others([*self.config.peers, *self.swarm.bootstraps])

    def _of_others(self, addresses: Sequence[str]) -> list[str]:
        return [address for address in dict.fromkeys(addresses) if not address.endswith(f"/p2p/{self.peer_id}")]

    async def _connected(self) -> set[PeerId]:
        with contextlib.suppress(NetworkDown):  # p2pd is being started again
            return await self.network.connected()
        return set()

    async def _call(self, addresses: Sequence[str]) -> bool:
        """Return whether a peer of the swarm answers at one of the addresses."""
        with contextlib.suppress(NetworkDown):
            return await self.network.connect(addresses, timeout_s=self.config.join_timeout_s)
        return False

    async def _stay_joined(self) -> None:
        """Look for the swarm while this peer is alone: at the start, and after all known peers have gone."""
        is_logged = False
        while True:
            alone = not self.joined.is_set() or not self._others()
            if alone and (bootstraps := self._bootstraps()):
                if await self._call(bootstraps):
                    self.joined.set()
                    await self.directory.refresh()
                    is_logged = False
                elif not (
                    is_logged
                    or self._is_turned_away()  # the user is told so
                    or not self.joined.is_set()  # the node or command says that it waits for the first answer
                    or any(peer_of(each) in _of_this_process for each in self.swarm.bootstraps)  # alone is normal
                ):
                    log.warning("waiting for %s: no machine of it answers at the moment", self.swarm.name)
                    is_logged = True
            await asyncio.sleep(self.config.rejoin_s)

    async def _watch_clock(self, time: SteadyTime) -> None:
        """Decide after each jump of the machine's clock whether this peer follows it.

        New announcements of other peers carry their time. If it fits the time before the jump better than the clock's, this peer
        keeps the former time, and looks again. Without such announcements it follows: it may have started with a wrong clock.
        """
        told = False
        while True:
            await asyncio.sleep(self.config.rejoin_s)
            if not time.jumped_s:
                told = False
                continue
            if not told:
                way = "forward" if time.jumped_s > 0 else "back"
                text = "this machine's clock was set %s by %.0f s; this node keeps its former time for as long as others share it"
                log.warning(text, way, abs(time.jumped_s))
                told = True
            self.directory.clock_offsets.clear()
            await asyncio.sleep(self.config.clock_s)
            offsets = self.directory.clock_offsets.values()
            ahead_s = statistics.median(offsets) if offsets else time.jumped_s
            if time.jumped_s and abs(ahead_s - time.jumped_s) < abs(ahead_s):
                time.follow()
                log.warning("this node follows the machine's clock now; if the clock is wrong, set it (NTP)")

    async def _tell_paths(self) -> None:
        """Announce the measured paths and the addresses of this peer at intervals."""
        while True:
            await asyncio.sleep(self.config.paths_s)
            if self.directory.own is not None:
                with contextlib.suppress(NetworkDown):  # p2pd is being started again
                    visitors, addresses = await self.network.visitors(), await self.network.addresses()
                    evidence = self.paths.check_reachability(addresses, self.config.announce_maddrs, visitors)
                    reached = self.paths.reachability.in_words
                    self.decisions.record(Topic.REACHABILITY, reached, evidence.sentences())
                    self.directory.announce(self._introduction(addresses))  # a relay may have accepted this peer
                self.directory.announce(self.paths.section(), self.observed_latency.section())

    def _others(self) -> list[PeerId]:
        return [peer for peer in self.directory.peers() if peer != self.peer_id]

    async def introduction(self) -> Introduction:
        """Return the section of this peer's announcements with its name and addresses. Raises NetworkDown."""
        return self._introduction(await self.network.addresses())

    def _introduction(self, reached_at: Sequence[str]) -> Introduction:
        addresses = [without_peer(address) for address in reached_at]
        addresses.sort(key=lambda address: (is_loopback(address), address))  # loopback last; else in a steady order
        return Introduction(name=self.name, addresses=tuple(addresses[:MAX_ADDRESSES]))

    async def wait_joined(self, timeout_s: float) -> None:
        """Wait until a peer of the swarm has answered.

        Raises NotAdmitted if the swarm turns this peer away, NetworkDown if no peer answers within `timeout_s` seconds.
        """
        try:
            await asyncio.wait_for(self.joined.wait(), timeout_s)
        except asyncio.TimeoutError:
            self.check_welcome()
            if self._is_turned_away():
                raise NetworkDown(
                    f"a machine of the swarm {self.swarm.name} answers that it cannot admit this one now",
                    remedy="Check the clocks of both machines, and try again in a minute.",
                ) from None
            if self.swarm.file is not None:
                raise NetworkDown(
                    f"the swarm {self.swarm.name} cannot be reached: none of its machines answers",
                    remedy=f"If this machine hosts it, start it: swarmnode host {shlex.quote(str(self.swarm.file))}",
                ) from None
            bootstraps = ", ".join(self._bootstraps()[:3]) or "no address known"
            raise NetworkDown(
                f"the swarm {self.swarm.name} cannot be reached: no peer answers at {bootstraps}"
            ) from None

    def _is_turned_away(self) -> bool:
        return self.access_control is not None and self.access_control.turned_away is not None

    def check_welcome(self, needs: Role = Role.CLIENT) -> None:
        """Raise NotAdmitted if the swarm does not admit this peer, or not for the role `needs`. Does nothing otherwise."""
        if self.access_control is not None:
            alone = not self.joined.is_set() or not self._others()
            self.access_control.check_welcome(self.peer_id, self.swarm.name, needs, alone=alone)

    async def wait_turned_away(self) -> None:
        """Watch for as long as the swarm admits this peer, without returning. Raises NotAdmitted once it does not."""
        while True:
            await asyncio.sleep(self.config.rejoin_s)
            self.check_welcome()

    async def manifest(self, *, patience_s: float) -> None:
        """Load the swarm's manifest: from this machine if it has it, else from peers, trying for `patience_s` seconds.

        Raises NetworkDown if no peer gives a manifest that matches the invite, ProtocolError if the one on this machine does not
        match.
        """
        if self.swarm.manifest is not None:
            return
        cache = ManifestCache(self.config.home)
        if (seen := cache.get(self.swarm.id)) is not None:
            self._apply_manifest(seen)
            return
        deadline_s = self.clock.monotonic() + patience_s
        while True:
            try:
                raw = await fetch_manifest(
                    self.network,
                    list(dict.fromkeys([*self._others(), *self.bootstraps()])),
                    self.hello,
                    self.link_config,
                    drop=self.directory.suspect,
                )
                self._apply_manifest(raw)
                cache.store(raw)
                return
            except PeerError as error:
                if self.clock.monotonic() > deadline_s:
                    raise NetworkDown(f"no peer of the swarm {self.swarm.name} gave its manifest: {error}") from error
            await asyncio.sleep(0.2)

    def _apply_manifest(self, raw: bytes) -> None:
        """Use the swarm's manifest from now on. Raises ProtocolError if it does not match the invite."""
        self.swarm = self.swarm.with_manifest(raw)
        peers = [known for peer, known in self.directory.peers().items() if peer != self.peer_id]
        self.directory.expel([known.peer for known in peers if self._fault_of(known) is not None])

    def _check_announcement(self, announcement: Announcement) -> None:
        """Raise ProtocolError for a node whose products are below the manifest's minimum, which is logged once."""
        fault = self._fault_of(announcement)
        if fault is None:
            return
        if announcement.peer not in self._reported_below and len(self._reported_below) < MAX_TOLD_BELOW:
            self._reported_below.add(announcement.peer)
            log.warning("node %s is left out: %s", announcement.name or announcement.peer[-8:], fault)
        raise fault

    def _fault_of(self, announcement: Announcement) -> ProtocolError | None:
        """Return the error of a node that holds layers and computes less precisely than the manifest asks; None without one."""
        manifest = self.swarm.manifest
        if manifest is not None and any(announcement.span):
            try:
                loading = announcement.life is not State.READY  # it may have no class yet
                bits = b"-" if loading else announcement.bits
                check_products(manifest.products or "", announcement.number_format, bits)
            except ProtocolError as error:
                return error
        return None

    def bootstraps(self) -> list[PeerId]:
        """Return the peers that the invite and the user name, whether or not they have announced themselves."""
        named = map(peer_of, self._named_bootstraps())
        return list(dict.fromkeys(peer for peer in named if peer is not None))

    def sign(self, message: bytes) -> bytes:
        """Sign `message` with the key of this peer's id."""
        return self.identity.sign(message)

    def lost_neighbour(self, error: PeerError) -> None:
        """Leave a peer out of routing and placement after its link ended by its own fault.

        Its next announcement brings it back. An error without a peer, or a mere refusal (PeerRefused), changes nothing.
        """
        if error.peer is not None and not isinstance(error, PeerRefused):
            self.directory.suspect(error.peer, error.code.name)
            facts = (
                f"its connection or a text on it broke off: {error}",
                "it is used again as soon as it announces itself anew",
            )
            self.decisions.record(Topic.ROUTING, "leaves a machine out for now", facts, about=(error.peer,))

    def limit(self, upload_bps: float | None, download_bps: float | None) -> None:
        """Change the rates of upload and download, in bits/s. A rate that is None, or that had no limit at the start, stays."""
        limiters = self.link_config.rate_limiter, self.link_config.download_limiter
        for limiter, rate_bps in zip(limiters, (upload_bps, download_bps), strict=True):
            if limiter is not None and rate_bps is not None:
                limiter.rate_bps = rate_bps

    def readings(self) -> Readings:
        """Yield the metrics of the swarm as this peer sees it."""
        yield from self.link_config.ledger.readings()
        peers = self.directory.peers().values()
        own = self.directory.own
        lives = Counter(peer.life for peer in peers)
        for state in State:
            yield Reading(table.PEERS, lives[state], (state_name(state),))
            if own is not None:
                yield Reading(table.STATE, own.life is state, (state_name(state),))
        if self.swarm.manifest is not None:
            units = self.swarm.manifest.model.units
            holders = Counter(unit for peer in peers if peer.life is State.READY for unit in range(*peer.span))
            yield Reading(table.UNITS, units)
            yield Reading(table.UNITS_WITHOUT_HOLDER, sum(not holders[unit] for unit in range(units)))
            yield Reading(table.LEAST_HOLDERS, min(holders[unit] for unit in range(units)))
        yield from self.standing.readings()
        yield from self.directory.dht_meter.readings()
        yield from self.link_config.traffic.readings()

    async def close(self) -> None:
        """Leave the swarm and stop. Calling it again changes nothing."""
        _of_this_process.discard(self.peer_id)
        await self._tasks.close()
        await self.directory.close()
        if self._lan is not None:
            await self._lan.close()
        if self.access_control is not None:
            await self.access_control.close()
        await self.network.close()
        self.slot.release()


def state_name(state: State) -> str:
    """Return the name of a state for people and scripts."""
    return state.name.lower()


@contextlib.asynccontextmanager
async def joining(
    swarm: Swarm, home: Path, *, patience_s: float = JOIN_S, platform: Platform = MACHINE
) -> AsyncIterator[Host]:
    """Join a swarm, wait until a peer of it answers, and yield the host. If the context raises, leave the swarm; else the caller
    closes the host.

    The wait is `patience_s`, but at most `JOIN_S` seconds. Raises NetworkDown if no peer answers in time, NotAdmitted if the swarm
    refuses us.
    """
    host = await Host.join(swarm, HostConfig(home, looks_on=True), role="client", platform=platform)
    try:
        await host.wait_joined(min(patience_s, JOIN_S))
        yield host
    except BaseException:
        await host.close()
        raise
