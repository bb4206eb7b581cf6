"""Settings of a gateway. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.codec.messages import LOOKUP


@dataclass(frozen=True)
class GatewayConfig:
    """Bounds on requests to the gateway. `origins` are the web origins whose pages browsers let call it (CORS); none by default."""

    running: int = 256  # generations at once, all keys together
    waiting: int = 256  # requests of one key that wait for a place
    wait_s: float = 60.0  # for a place
    max_choices: int = 16  # texts of one request: n times its prompts
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0  # for a body to arrive
    write_timeout_s: float = 60.0  # for a client to take one piece of a stream
    default_new_tokens: int = 1024  # if a request sets no maximum; fewer if they do not fit
    loopback: bool = True  # only this machine connects: another name in Host means that a web page led the browser here
    origins: tuple[str, ...] = ()
    compress: str = "auto"  # encoding of tensors between peers, for all requests to this gateway
    drafts: str = LOOKUP  # source of guessed tokens, for all requests to this gateway
