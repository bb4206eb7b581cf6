"""Who may see and command the nodes of this machine: a page on this machine that has the owner's token.

The token lies in the home folder, where only its owner can read it, and goes to the page behind the # of its address, which
browsers send to nobody. It stays the same, so that the address can be kept.
"""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from swarmnode.files.durable import write_private
from swarmnode.gateway.access.guard import LOOPBACK_NAMES
from swarmnode.gateway.http.api_error import ApiError
from swarmnode.swarm.storage.user_file import read_user_file

FILE = "page-token"
HEADER = "X-Swarmnode-Owner"
TOKEN_BYTES = 24
MAX_FILE_BYTES = 1 << 10
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class OwnerAccess:
    """Of the nodes that run from one home folder. Raises LocalError where its token cannot be kept there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.token = _token_in(home / FILE)

    def __repr__(self) -> str:
        return f"<OwnerAccess to the nodes of {self.home}>"

    def check(self, request: Request) -> None:
        """Raises ApiError (403) unless it is the owner who asks, from this machine and by no other's page."""
        presented = request.headers.get(HEADER, "")
        if not _comes_from_here(request) or not secrets.compare_digest(presented.encode(), self.token.encode()):
            raise ApiError(
                403,
                "only the owner of this machine sees and commands its nodes, by the address that `swarmnode serve` prints",
                code="not_owner",
            )


def _comes_from_here(request: Request) -> bool:
    """Straight, without a proxy: a tunnel that ends on this machine is not its owner."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    peer = request.client.host if request.client is not None else ""
    return (
        _is_loopback(peer)
        and urlsplit(f"//{host}").hostname in LOOPBACK_NAMES
        and (origin is None or urlsplit(origin).netloc == host)
        and not any(name in request.headers for name in FORWARDED)
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _token_in(path: Path) -> str:
    kept = read_user_file(path, max_bytes=MAX_FILE_BYTES, what="the page's token")
    if kept is not None and len(token := kept.decode(errors="replace").strip()) >= TOKEN_BYTES:
        return token
    token = secrets.token_urlsafe(TOKEN_BYTES)
    write_private(path, token.encode(), make_folder=True)
    return token
