"""Token ids as what a client sends to the first hop."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

from swarmnode.codec.messages import Input, Want
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.net.links.hop import Entry


def ids_entry(start: int, ids_BT: Sequence[Sequence[int]], want: Want, reorder: tuple[int, ...] = ()) -> Entry:
    """Token ids as an entry of the journal: int64, little-endian, row-major."""
    flat = array.array("q", [token for row in ids_BT for token in row])
    if sys.byteorder == "big":
        flat.byteswap()
    info = TensorInfo(Codec.NONE, DType.INT64, (len(ids_BT), len(ids_BT[0])))
    return Entry(start, len(ids_BT[0]), Input(info, want=want, reorder=reorder), (flat.tobytes(),))
