"""Settings of a gateway. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayConfig:
    """Bounds on what whoever connects may ask for. `origins` are the pages that browsers may call from (CORS): none."""

    running: int = 256  # generations at once, of all keys
    waiting: int = 256  # of one key, that wait for their turn
    wait_s: float = 60.0  # for a turn
    max_choices: int = 16  # of a request: n, times its prompts
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0  # for a body to arrive
    write_timeout_s: float = 60.0  # for a reader to take what is there for it
    default_new_tokens: int = 1024  # where a request does not say how many; fewer where they do not fit
    loopback: bool = True  # only this machine connects: whoever asks under another name was led here by a page
    origins: tuple[str, ...] = ()
    compress: str = "auto"  # as what states go from peer to peer, for all that is asked here
