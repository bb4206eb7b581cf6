"""Lines between stages that are all alike."""

from __future__ import annotations

import numpy as np

from swarmnode.plan.training.wiring import Transfers


def links(peers: str, *, delay_s: float = 0.0, sending_s: float = 0.0) -> Transfers:
    transfers = Transfers()
    apart = 1 - np.eye(len(peers))
    transfers.know(list(peers), delay_s * apart, sending_s * apart)
    return transfers
