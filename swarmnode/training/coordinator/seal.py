"""The seal of a lease: by it a hop knows that the coordinator gave the lease, for this microbatch and route, to this trainer.

A term's key is known to the coordinator and to the stages that it leads, who hear it with its LEAD.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from swarmnode.codec.body import HopSpec
from swarmnode.codec.training_fields import SEAL_BYTES
from swarmnode.codec.training_messages import Forward, Labels
from swarmnode.net.interfaces import PeerId


def seal_lease(
    key: bytes, run: bytes, term: int, lease: int, step: int, number: int, route: Sequence[HopSpec], feeder: PeerId
) -> bytes:
    """16 bytes: BLAKE2b with the term's key over the msgpack array of all of it."""
    sealed = msgspec.msgpack.encode((run, term, lease, step, number, tuple(route), feeder))
    return hashlib.blake2b(sealed, key=key, digest_size=SEAL_BYTES).digest()


def is_sealed(key: bytes, body: Forward | Labels) -> bool:
    """Whether it is of a lease of this key."""
    expected = seal_lease(key, body.run, body.term, body.lease, body.step, body.number, body.route, body.feeder)
    return bool(key) and hmac.compare_digest(expected, body.seal)
