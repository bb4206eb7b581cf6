"""Checks of a machine's internet connection: its clock, the kind of its NAT, and port mapping by the router.

Checks of a machine before it joins a swarm: each returns a finding with a verdict and a remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import platform
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from swarmnode.codec.body import VERSION
from swarmnode.compute.capacity.capacity import unit_sizes, usable_bytes
from swarmnode.compute.capacity.expert_tiers import whole_model_tier
from swarmnode.compute.device import probe_device, usable_cores
from swarmnode.compute.packing import ggml
from swarmnode.compute.stopwatch import measure_disk, measure_read_rate
from swarmnode.config import StageConfig
from swarmnode.counting import counted, format_bytes
from swarmnode.errors import LocalError
from swarmnode.files import existing, may_write
from swarmnode.measuring.packed_products import MEMORY_SHARE, has_packed_products, host_memory, missing_products
from swarmnode.metrics.machine import nvidia_cards
from swarmnode.net.addressing.addresses import is_public
from swarmnode.net.addressing.reachability import answers, own_interfaces, seen_at
from swarmnode.swarm.records.invite import open_grant
from swarmnode.swarm.records.manifest import Manifest
from swarmnode.swarm.storage.content import PACKED_NAME, is_weights
from swarmnode.swarm.storage.swarmfile import Swarm

if TYPE_CHECKING:
    from swarmnode.compute.model.checkpoint import Checkpoint
    from swarmnode.links.link_config import PeerVersions
    from swarmnode.measuring.bandwidth import Bandwidth


MEMORY_LEAST_BYTES = 2 << 30
DISK_LEAST_BYTES = 10 << 30
DISK_LEAST_BYTES_PER_S = 50e6  # of an old hard disk: weights of 10 GB load in three minutes
FILES_LEAST = 1024
TRY_S = 5.0
UP_LEAST_BPS = 5e6  # a step of an 8 B model is 16 KB a token and hop: a prompt of 1,000 tokens then takes half a minute

Verdict = Literal["good", "doubtful", "bad"]


class Finding(NamedTuple):
    """The result of one check: its subject (`what`), the verdict, the observation (`seen`), and a remedy, which is empty if
    the verdict is good."""

    what: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def examine_machine(home: Path) -> list[Finding]:
    """Run every check that needs no network. Takes a second or two."""
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    free_bytes = probe_device("cpu").free_bytes
    remedy, seen = "close other programs: little of a model fits", f"{free_bytes / 1e9:.1f} GB free"
    memory = _enough("memory", free_bytes >= MEMORY_LEAST_BYTES, seen, remedy)
    return [Finding("python", "good", version), _torch(), memory, *_folder(home), _files(), _daemon(), _ipv6()]


async def examine_bootstraps(swarm: Swarm) -> list[Finding]:
    """Try to connect to each bootstrap peer of the swarm. An address that does not answer is doubtful if another one
    answers, else bad."""
    if not swarm.bootstraps:
        return [Finding("way in", "bad", "the invite names no machine to connect to", "ask for another invite")]
    tried = await asyncio.gather(*(answers(address, TRY_S) for address in swarm.bootstraps))
    remedy = "its machine must be on and reachable at this port and address; is this machine online?"
    return [
        Finding("way in", "good", f"{address} answers")
        if yes
        else Finding("way in", "doubtful" if any(tried) else "bad", f"{address} does not answer", remedy)
        for address, yes in zip(swarm.bootstraps, tried, strict=True)
    ]


def judge_invite(swarm: Swarm, now: float) -> Finding:
    """Judge an invite that this machine has not used yet, by what the owner signed. It is bad if it expired before unix time
    `now`. Raises ProtocolError if the invite is not the owner's."""
    grant = open_grant(swarm.grant, swarm.id, swarm.owner)
    if 0 < grant.expires_at <= now:
        return Finding("invite", "bad", "it has expired", "ask the person who invited you for a new one")
    end = "for ever" if not grant.expires_at else f"until {time.strftime('%Y-%m-%d', time.localtime(grant.expires_at))}"
    return Finding("invite", "good", f"for a {grant.allows.name.lower()}, {end}; this test used none of its uses")


def judge_weights(manifest: Manifest, outline: Checkpoint | None = None) -> list[Finding]:
    """Judge how many layers of packed weights this machine's memory holds; no finding for a swarm without them. The layers count
    as equally large. With the `outline` of a mixture, say how many experts lie in memory if the others stay on the disk."""
    if manifest.file(PACKED_NAME) is None:
        return []
    device, units = probe_device("auto"), manifest.model.units
    weights_bytes = sum(file.size for file in manifest.files if is_weights(file.name))
    room_bytes = int(device.free_bytes * MEMORY_SHARE)
    held = min(units, usable_bytes(room_bytes) * units // max(1, weights_bytes))
    seen = f"{format_bytes(room_bytes)} hold about {held} of {units} layers, packed"
    is_cpu = device.kind == "cpu"
    try:
        lacks_products, host = is_cpu and not has_packed_products(device), host_memory(device)
    except LocalError as error:  # the owner's own build of ggml
        return [Finding("weights", "bad", "packed, and ggml cannot be loaded", str(error))]
    if lacks_products:
        seen = f"{format_bytes(weights_bytes)} are packed, and dequantised here, which takes several times the memory"
        return [Finding("weights", "doubtful", seen, missing_products(device))]
    if outline is not None and (is_cpu or host is not None):
        import torch

        dtype = torch.float32 if is_cpu else device.dtype_for(outline.dtype)
        sizes = unit_sizes(outline, dtype=dtype, keeps_packed=True)
        if tier := whole_model_tier(outline, sizes, room_bytes, StageConfig().cache_tokens, host):
            place = "on the disk" if is_cpu else "in the memory beside the card"
            seen += f", or all of them with experts {place} ({tier})"
    if is_cpu:
        seen += f", multiplied by {ggml.build()}"
    return [_enough("weights", held > 0, seen, "free memory, or lend a machine with more")]


def judge_versions(met: PeerVersions) -> Finding:
    """Compare this node's protocol version with those of the peers that it met. It is doubtful if most of them speak a
    newer one."""
    if met.newer is not None:
        remedy = "upgrade when it suits you: `swarmnode doctor --update` tells you how"
        return Finding("protocol", "doubtful", f"version {VERSION}, most machines speak {met.newer}", remedy)
    others = f", up to date ({counted(len(met), 'machine')} seen)" if len(met) else ""
    return Finding("protocol", "good", f"version {VERSION}{others}")


def judge_bandwidth(seen: Bandwidth) -> list[Finding]:
    """Judge the upload rate that bandwidth tests with peers measured. It is doubtful if no peer answered."""
    if not seen.peers:
        remedy = "a machine answers one test in ten minutes, and none while it is busy: try again later"
        return [Finding("bandwidth", "doubtful", "no machine has answered a test", remedy)]
    up, down = (f"{float(format(bps / 1e6, '.2g')):,g}" for bps in (seen.up_bps, seen.down_bps))
    rates = f"{up} Mbit/s up, {down} down, with {counted(seen.peers, 'machine')}"
    remedy = (
        "prompts wait for this connection: hold the first or the last layers, or lend to a training that compresses"
    )
    return [_enough("bandwidth", seen.up_bps >= UP_LEAST_BPS, rates, remedy)]


def _enough(what: str, good: bool, seen: str, remedy: str) -> Finding:
    return Finding(what, "good", seen) if good else Finding(what, "doubtful", seen, remedy)


def _torch() -> Finding:
    """Check that this build of torch can use this machine's graphics card."""
    import torch

    device, version = probe_device(), metadata.version("torch")
    seen = f"torch {version}, {device}, reads {measure_read_rate(device) / 1e9:.0f} GB/s"
    if device.kind == "cpu" and nvidia_cards()[1]:
        remedy = "this torch cannot use the card: install a build with CUDA (https://pytorch.org/get-started), or update the driver"
        return Finding("device", "bad", f"{seen}; an NVIDIA card is here", remedy)
    if device.kind == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device.index))
        if architecture not in torch.cuda.get_arch_list():
            return Finding(
                "device", "doubtful", f"{seen}; built without {architecture}", "install a build for this card"
            )
    return Finding("device", "good", f"{seen}, {usable_cores()} cores")


def _folder(home: Path) -> Iterator[Finding]:
    """Yield the space and the speed of the home folder's disk, and whether the folder can be written. No file stays there."""
    place, another = existing(home), "choose another folder with --home or SWARMNODE_HOME"
    free_bytes = shutil.disk_usage(place).free
    remedy = "free some space (`swarmnode models prune`), or choose another disk with --home"
    yield _enough("disk", free_bytes >= DISK_LEAST_BYTES, f"{free_bytes / 1e9:.1f} GB free at {place}", remedy)
    try:
        written, read = measure_disk(place)
    except LocalError as error:
        yield Finding("disk speed", "bad", str(error), another)
    else:
        seen = f"writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
        remedy = "weights load slowly from it: choose another disk with --home"
        yield _enough("disk speed", min(written, read) >= DISK_LEAST_BYTES_PER_S, seen, remedy)
    is_good = may_write(place)
    yield (
        Finding("home", "good", str(home)) if is_good else Finding("home", "bad", f"{place} cannot be written", another)
    )


def _files() -> Finding:
    if sys.platform == "win32":
        return Finding("open files", "good", "not limited")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES_LEAST
    may = hard == resource.RLIM_INFINITY or hard >= FILES_LEAST
    wanted = 4 * FILES_LEAST if hard == resource.RLIM_INFINITY else min(hard, 4 * FILES_LEAST)
    remedy = (
        f"ulimit -n {wanted}" if may else f"have the system's administrator allow {FILES_LEAST} (nofile in limits.conf)"
    )
    return _enough("open files", enough, f"at most {soft:,} at a time", remedy)


def _daemon() -> Finding:
    """Check that the network daemon which hivemind installs is on the disk."""
    found = next((file for file in metadata.files("hivemind") or () if file.name == "p2pd"), None)
    path = None if found is None else Path(str(found.locate()))
    if path is None or not path.is_file():
        return Finding(
            "network program",
            "bad",
            "p2pd is missing",
            "install swarmnode again: hivemind's wheel has it for Linux and macOS only",
        )
    return Finding("network program", "good", str(path))


def _ipv6() -> Finding:
    """Look for a public IPv6 address, which spares hole punching with many providers."""
    public = [address for address in sorted(own_interfaces()) if ":" in address and is_public(f"/ip6/{address}/tcp/1")]
    if public and socket.has_ipv6:
        return Finding("IPv6", "good", public[0])
    return Finding("IPv6", "good", "none, and none is needed: others reach this machine over IPv4")


ANSWER_S = 2.0
TIME_SERVERS = (("pool.ntp.org", 123), ("time.cloudflare.com", 123))
STUN_SERVERS = (("stun.cloudflare.com", 3478), ("stun.l.google.com", 19302))
ROUTERS = ("239.255.255.250", 1900)  # multicast address of UPnP devices on the local network
CARRIERS = ipaddress.ip_network("100.64.0.0/10")  # between a provider's NAT and its customers (RFC 6598)
SKEW_S, MOST_SKEW_S = 1.0, 3.0  # announcements are signed with times: peers reject those of a clock that is far off
NTP_EPOCH_S = 2_208_988_800  # Unix time 0 in NTP's seconds
SEARCH = (
    b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    b"ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
)

Server = tuple[str, int]


def examine_network() -> list[Finding]:
    """Run all checks of the connection, in some seconds. Changes nothing, neither here nor at the router."""
    return [clock(), nat(), upnp()]


def clock(servers: Sequence[Server] = TIME_SERVERS) -> Finding:
    """Compare this machine's clock with the first of the time `servers` that answers (SNTP, RFC 4330). It is doubtful if
    none answers."""
    skew_s = next((skew for server in servers if (skew := _skew_s(server)) is not None), None)
    if skew_s is None:
        return Finding(
            "clock", "doubtful", "no time server answers", "is this machine online? Compare its clock by hand"
        )
    seen = f"{abs(skew_s):.2f} s {'behind' if skew_s > 0 else 'ahead'}"
    if abs(skew_s) < SKEW_S:
        return Finding("clock", "good", seen)
    verdict: Verdict = "bad" if abs(skew_s) > MOST_SKEW_S else "doubtful"
    return Finding("clock", verdict, seen, "let the system set its clock: timedatectl set-ntp true")


def _skew_s(server: Server) -> float | None:
    """Return how many seconds the server's clock is ahead of this machine's, or None if it does not answer or has no time.

    The answer is taken to have been given in the middle of the wait.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.settimeout(ANSWER_S)
        asked_s = time.time()
        try:
            port.sendto(b"\x23" + bytes(47), server)  # version 4, client
            answer, _sender = port.recvfrom(512)
        except OSError:
            return None
        heard_s = time.time()
    if len(answer) < 48 or not any(answer[40:44]):
        return None
    seconds, fraction = struct.unpack_from(">II", answer, 40)
    return float(seconds - NTP_EPOCH_S + fraction / 2**32 - (asked_s + heard_s) / 2)


def nat(servers: Sequence[Server] = STUN_SERVERS) -> Finding:
    """Determine the kind of NAT: whether several STUN `servers` see one socket at the same address (cone NAT, hole punching
    works) or at different ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("", 0))
        seen = [address for server in servers if (address := seen_at(port, server, ANSWER_S)) is not None]
        own = port.getsockname()[1]
    if not seen:
        return Finding("NAT", "doubtful", "no STUN server answers", "UDP is barred here, or this machine is offline")
    # The address that this machine uses towards a server; None without a route. Nothing is sent.
    host = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port, contextlib.suppress(OSError):
        port.connect(servers[0])
        host = str(port.getsockname()[0])
    if host is not None and seen[0][0] == host:
        return Finding("NAT", "good", f"none: this machine is {host} itself")
    carrier = ", behind a provider's NAT" if host and ipaddress.ip_address(host) in CARRIERS else ""
    if len(set(seen)) > 1:
        remedy = "others reach it over relays; --nat, or a forwarded port with --announce-maddr, does better"
        return Finding("NAT", "doubtful", f"symmetric{carrier}: seen at {len(set(seen))} addresses", remedy)
    if len(seen) == 1:
        return Finding(
            "NAT", "doubtful", f"seen at {seen[0][0]}{carrier}", "one STUN server answers; its kind takes two"
        )
    kept = ", ports are kept" if seen[0][1] == own else ""
    return Finding(
        "NAT", "good", f"cone{carrier}, seen at {seen[0][0]}{kept}: other machines can connect through your router"
    )


def upnp(routers: Server = ROUTERS) -> Finding:
    """Return whether a router on this network says that it maps ports. Without an answer the verdict is good: --nat has no
    effect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.settimeout(ANSWER_S)
        try:
            port.sendto(SEARCH, routers)
            answer, sender = port.recvfrom(2048)
        except OSError:
            return Finding("UPnP", "good", "no router answers: --nat would change nothing")
    if not answer.startswith(b"HTTP/1.1 200"):
        return Finding(
            "UPnP", "doubtful", f"{sender[0]} gives an answer that swarmnode does not know", "leave --nat alone"
        )
    return Finding("UPnP", "good", f"the router at {sender[0]} maps ports: --nat lets others in directly")
