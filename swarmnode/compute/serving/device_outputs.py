"""What a pass leaves on its device for the host, brought there at once: a card is waited for once, whoever shares it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNMENT_BYTES = 8  # of each tensor in what is brought: that of the widest elements


class DeviceOutputs:
    """Of one pass. `add` what is wanted, `fetch` it all, and look it up under the number that `add` gave."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def __repr__(self) -> str:
        return f"<DeviceOutputs of {len(self._parts)} tensors>"

    def add(self, tensor: Tensor) -> int:
        """Its number. It must not be written to any more."""
        self._parts.append(tensor.detach())
        return len(self._parts) - 1

    def fetch(self) -> list[Tensor]:
        """All of them on the host, by number: those that are there already as they are, the others in one copy."""
        far = [number for number, part in enumerate(self._parts) if part.device.type != "cpu"]
        if far:
            whole_M = _to_host(torch.cat([_aligned(self._parts[number]) for number in far]))
            begin = 0
            for number in far:
                part = self._parts[number]
                self._parts[number] = whole_M[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
                begin += part.nbytes + -part.nbytes % ALIGNMENT_BYTES
        return self._parts


def _to_host(far_M: Tensor) -> Tensor:
    """Waits for it; through pinned memory where it comes from a card, which needs no buffer of the driver's between."""
    if far_M.device.type != "cuda":
        return far_M.cpu()
    near_M = far_M.to("cpu", non_blocking=True)
    torch.accelerator.current_stream(far_M.device).synchronize()
    return near_M


def _aligned(part: Tensor) -> Tensor:
    """Its bytes, and some more up to where the next tensor may begin."""
    bytes_M = part.contiguous().view(-1).view(torch.uint8)
    surplus = -len(bytes_M) % ALIGNMENT_BYTES
    return pad(bytes_M, (0, surplus)) if surplus else bytes_M
