"""Transfers of a pass: the inputs of all its sessions to the device, and their outputs to the host, each in one copy.

Inputs are gathered in a pinned buffer, so that the host does not wait for their copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import FLOAT_DTYPES, TensorInfo
from swarmnode.compress.codecs import Buffer, decode, decode_in_place

ALIGNMENT_BYTES = 8  # of each tensor within a transfer: that of the widest elements


class DeviceOutputs:
    """Outputs of one pass on their way to the host: `add` the wanted tensors, then `fetch` them all."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def __repr__(self) -> str:
        return f"<DeviceOutputs of {len(self._parts)} tensors>"

    def add(self, tensor: Tensor) -> int:
        """Take `tensor`, which must not be written to any more. Returns its place in the list that `fetch` returns."""
        self._parts.append(tensor.detach())
        return len(self._parts) - 1

    def fetch(self) -> list[Tensor]:
        """Return all added tensors on the host, by number. Those on a device come in one copy."""
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
    """Copy to the host, and wait for it. From a card it goes to pinned memory, which needs no intermediate buffer of the driver."""
    if far_M.device.type != "cuda":
        return far_M.cpu()
    near_M = far_M.to("cpu", non_blocking=True)
    torch.accelerator.current_stream(far_M.device).synchronize()
    return near_M


def _aligned(part: Tensor) -> Tensor:
    """Return a tensor's bytes, padded to the alignment of the next tensor."""
    bytes_M = part.contiguous().view(-1).view(torch.uint8)
    surplus = -len(bytes_M) % ALIGNMENT_BYTES
    return pad(bytes_M, (0, surplus)) if surplus else bytes_M


class DeviceInputs:
    """Inputs of one pass on their way to the device: `add` them all, and the first call of `tensor` sends them.

    Token ids stay on the host, which checks them first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[TensorInfo, Buffer]] = []
        self._sent: dict[int, Tensor] | None = None

    def __repr__(self) -> str:
        return f"<DeviceInputs of {len(self._parts)} tensors for {self._device}>"

    def add(self, info: TensorInfo, payload: Buffer) -> int:
        """Take an input, whose payload must not change any more. Returns its number for `tensor`."""
        self._parts.append((info, payload))
        return len(self._parts) - 1

    def tensor(self, number: int) -> Tensor:
        """Return the input with this number: floats on the device, others on the host.

        Raises ProtocolError if the payload does not match its descriptor.
        """
        info, payload = self._parts[number]
        if self._sent is None:
            self._sent = self._send()
        if number in self._sent:
            return decode_in_place(info, self._sent[number])
        return decode(info, payload, device=self._device if info.dtype in FLOAT_DTYPES else "cpu")

    def _send(self) -> dict[int, Tensor]:
        """Send the float payloads to a card in one copy. Returns payload_M (uint8) by number; empty on other devices."""
        if self._device.type != "cuda":
            return {}
        places: dict[int, slice] = {}
        end = 0
        for number, (info, payload) in enumerate(self._parts):
            if info.dtype in FLOAT_DTYPES:
                size = memoryview(payload).nbytes
                places[number] = slice(end, end + size)
                end += size + -size % ALIGNMENT_BYTES
        if not places:
            return {}
        pinned_M = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        gathered = pinned_M.numpy().data
        for number, place in places.items():
            gathered[place] = memoryview(self._parts[number][1]).cast("B")
        far_M = pinned_M.to(self._device, non_blocking=True)
        return {number: far_M[place] for number, place in places.items()}
