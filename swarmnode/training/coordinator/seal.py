"""Seal of a lease: it proves to a hop that the coordinator gave this lease, for this microbatch and route, to this trainer.

The coordinator sends the key of its term to the stages with LEAD; no other peer knows it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from swarmnode.codec.body import HopSpec
from swarmnode.codec.training_messages import SEAL_BYTES, Forward, Labels
from swarmnode.net.interfaces import PeerId


def seal_lease(
    key: bytes, run: bytes, term: int, lease: int, step: int, number: int, route: Sequence[HopSpec], feeder: PeerId
) -> bytes:
    """Return the seal, 16 bytes: BLAKE2b, keyed with the term's key, over the msgpack array of all other arguments."""
    sealed = msgspec.msgpack.encode((run, term, lease, step, number, tuple(route), feeder))
    return hashlib.blake2b(sealed, key=key, digest_size=SEAL_BYTES).digest()


def is_sealed(key: bytes, body: Forward | Labels) -> bool:
    """Return whether the seal of `body` is the one of its fields under `key`; False if the key is empty."""
    expected = seal_lease(key, body.run, body.term, body.lease, body.step, body.number, body.route, body.feeder)
    return bool(key) and hmac.compare_digest(expected, body.seal)
