"""What the sessions of a pass send to its device, brought there at once: gathered in one pinned buffer, for which nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.codec.tensors import FLOAT_DTYPES, TensorInfo
from swarmnode.compress.codecs import Buffer, decode, decode_in_place
from swarmnode.compute.serving.device_outputs import ALIGNMENT_BYTES


class DeviceInputs:
    """Of one pass. `add` all that it takes; the first `tensor` that is asked for sends them. Token ids stay on the host, where they
    are looked at first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[TensorInfo, Buffer]] = []
        self._sent: dict[int, Tensor] | None = None

    def __repr__(self) -> str:
        return f"<DeviceInputs of {len(self._parts)} tensors for {self._device}>"

    def add(self, info: TensorInfo, payload: Buffer) -> int:
        """Its number. It must not change any more."""
        self._parts.append((info, payload))
        return len(self._parts) - 1

    def tensor(self, number: int) -> Tensor:
        """What was added under this number. Raises ProtocolError where the payload is not what its descriptor says."""
        info, payload = self._parts[number]
        if self._sent is None:
            self._sent = self._send()
        if number in self._sent:
            return decode_in_place(info, self._sent[number])
        return decode(info, payload, device=self._device if info.dtype in FLOAT_DTYPES else "cpu")

    def _send(self) -> dict[int, Tensor]:
        """payload_M (uint8) on a card, by number; none on other devices, which have them already or know no pinned memory."""
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
