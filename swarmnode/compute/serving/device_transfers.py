"""Transfers of a pass: the inputs of all its sessions to the device, and their outputs to the host, each in one copy.

Inputs are gathered in a pinned buffer, so that the host does not wait for their copy.

Work on the results of passes as CUDA graphs: encoding and examining them repeats from step to step, and is one launch then.

A graph belongs to one kind of work on so many tensors of one shape. It is captured after some uses, so that its kernels are
compiled, and has memory of its own: graphs of a pass have their results at the same time. Its results are valid until its next
replay.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmnode.codec.tensors import FLOAT_DTYPES, LARGEST_VALUE, MAX_ELEMENTS, Codec, TensorInfo, check_tensor
from swarmnode.compress.codecs import (
    Buffer,
    decode,
    decode_alike,
    decode_in_place,
    encode_alike,
    encode_in_place,
    goes_together,
    info_of,
)
from swarmnode.compute.executor import card_answers, forget_traceback
from swarmnode.errors import ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation

log = logging.getLogger(__name__)

Work = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function for tensors of one shape: its results have a row (S, …) for each. It waits for no device"""

USES = 8  # before a capture
MOST_KINDS = 64  # whose uses are counted
INPUT_BYTES = 1 << 19  # most of a graph's input: steps of decoding; with more, launches do not matter
HELD = 12  # times the input: it, its copies in float32 and float64, and results
# Of torch's allocator: a graph has segments of its own.
SMALL_SEGMENT, LARGE_SEGMENT, SMALL_BYTES = 2 << 20, 20 << 20, 1 << 20
HELD_BYTES = 64 << 20  # most of all graphs; those used least recently are dropped


def held_bytes(input_bytes: int) -> int:
    """Return the memory that a graph with this input may take."""
    inner = HELD * input_bytes
    return inner + SMALL_SEGMENT + (LARGE_SEGMENT if inner > SMALL_BYTES else 0)


class CapturedWorks:
    """Graphs of repeated work on one card. Used from its compute thread only."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._ledger = ledger or MemoryLedger()
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _CapturedWork] = OrderedDict()
        self.refusal = ""  # why nothing is captured

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, work: Work, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `work(tensors)`, for tensors of one shape, dtype and card: by its graph, if it has one. Raises the errors of the
        work."""
        first = tensors[0]
        key = work, first.shape, first.dtype, first.device, len(tensors)
        if (captured := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return captured.replay(tensors)
        results = work(tensors)
        if not self.refusal and first.nbytes * len(tensors) <= INPUT_BYTES:
            self._uses[key] = uses = self._uses.pop(key, 0) + 1
            if len(self._uses) > MOST_KINDS:
                self._uses.popitem(last=False)
            if uses % USES == 0:
                self._capture(key, work, tensors)
        return results

    def _capture(self, key: Hashable, work: Work, tensors: Sequence[Tensor]) -> None:
        size_bytes = held_bytes(tensors[0].nbytes * len(tensors))
        while self._graphs and size_bytes + sum(graph.size_bytes for graph in self._graphs.values()) > HELD_BYTES:
            self._graphs.popitem(last=False)[1].release()
        try:
            memory = self._ledger.reserve(Account.ACTIVATIONS, size_bytes)
            try:
                self._graphs[key] = _CapturedWork(work, tensors, size_bytes, memory)
            except Exception:
                memory.release()
                raise
        except (Full, torch.OutOfMemoryError) as error:
            log.info("no memory to capture %s: %s", work, error)
            forget_traceback(error)
        except Exception as error:  # a driver may refuse
            if not card_answers():
                raise
            self.refusal = f"{type(error).__name__}: {error}"
            log.info("work on results is not captured: %s", self.refusal)
            forget_traceback(error)

    def clear(self) -> None:
        """Drop all graphs, and give their memory back."""
        for captured in self._graphs.values():
            captured.release()
        self._graphs.clear()
        self._uses.clear()


class _CapturedWork:
    """Captured work, with the memory that it reads and writes."""

    def __init__(self, work: Work, tensors: Sequence[Tensor], size_bytes: int, memory: Reservation) -> None:
        self.size_bytes, self._memory = size_bytes, memory
        self._input = torch.stack(list(tensors))
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = work(self._input.unbind())

    def replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the captured work on `tensors`. Returns its results, which the next replay overwrites."""
        torch.stack(list(tensors), out=self._input)
        self._graph.replay()
        return self._results

    def release(self) -> None:
        """Give the reserved memory back."""
        self._memory.release()


ALIGNMENT_BYTES = 8  # of each input within a transfer: that of the widest elements


Rows = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function from the fetched tensors to one tensor's rows of the results of its Work"""

Payload = Callable[[Sequence[Tensor]], Tensor]
"""Function from the fetched tensors to a payload uint8_M"""

Check = Callable[[Sequence[Tensor]], bool]
"""Function from the fetched tensors to a test's outcome"""


class DeviceOutputs:
    """Outputs of one pass on their way to the host: `add` the wanted tensors, then `fetch` them all.

    On a card, tensors of one shape are encoded together and examined together, when they are fetched: a launch costs as much for
    all sessions as for one.
    """

    def __init__(self, works: CapturedWorks | None = None) -> None:
        self._works = works  # replays what is computed; None: nothing is replayed
        self._parts: list[Tensor] = []
        self._alike: dict[Hashable, tuple[Work, list[Tensor]]] = {}  # what is to be computed together
        self._results: dict[Hashable, list[int]] = {}  # its places

    def add(self, tensor: Tensor) -> int:
        """Take `tensor`, which must not be written to any more. Returns its place in the list that `fetch` returns."""
        self._parts.append(tensor.detach())
        return len(self._parts) - 1

    def add_encoded(self, tensor: Tensor, codec: Codec) -> tuple[TensorInfo, Payload]:
        """Take a tensor that is to be encoded. Returns its descriptor, and the function that finds its payload.

        Raises ValueError if the codec does not carry the tensor's dtype.
        """
        info = info_of(tensor, codec)
        if info is None or tensor.device.type != "cuda" or not goes_together(info):
            info, payload_M = encode_in_place(tensor, codec)
            place = self.add(payload_M)
            return info, lambda fetched: fetched[place]
        payload_of = self.add_each(tensor, Encoding(codec))
        return info, lambda fetched: payload_of(fetched)[0]

    def add_finiteness(self, tensor: Tensor) -> Check:
        """Ask whether a tensor has no NaN and no magnitude above LARGEST_VALUE. Returns the function that finds the answer."""
        if tensor.device.type != "cuda" or not tensor.numel():
            place = self.add(finiteness(tensor))
            return lambda fetched: bool(fetched[place])
        answer_of = self.add_each(tensor, finiteness_of_each)
        return lambda fetched: bool(answer_of(fetched)[0])

    def add_each(self, tensor: Tensor, work: Work) -> Rows:
        """Take a tensor for `work`, which is called once for all tensors of one shape that were added with an equal work. Returns
        the function that finds this tensor's rows of the results."""
        key = work, tensor.shape, tensor.dtype, tensor.device
        _, tensors = self._alike.setdefault(key, (work, []))
        tensors.append(tensor.detach())
        number = len(tensors) - 1
        return lambda fetched: [fetched[place][number] for place in self._results[key]]

    def fetch(self) -> list[Tensor]:
        """Return all added tensors on the host, by number. Those on a device come in one copy."""
        for key, (work, tensors) in self._alike.items():
            results = work(tensors) if self._works is None else self._works.run(work, tensors)
            self._results[key] = [self.add(result) for result in results]
        self._alike = {}
        # Wide elements first: then all are aligned without padding.
        far = [number for number, part in enumerate(self._parts) if part.device.type != "cpu"]
        far.sort(key=lambda number: -self._parts[number].itemsize)
        if far:
            parts = (self._parts[number] for number in far)
            whole_M = _to_host(torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]))
            begin = 0
            for number in far:
                part = self._parts[number]
                self._parts[number] = whole_M[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
                begin += part.nbytes
        return self._parts


@dataclass(frozen=True)
class Encoding:
    """Work that encodes tensors."""

    codec: Codec

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the payloads (uint8_SM,)."""
        return (encode_alike(tensors, self.codec),)


def finiteness(tensor: Tensor) -> Tensor:
    """Return whether no element is NaN or above LARGEST_VALUE: a bool tensor on the tensor's device, without waiting for it.

    A NaN among the elements is both their minimum and their maximum.
    """
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool)
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).float() <= LARGEST_VALUE


def finiteness_of_each(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return for tensors of one shape whether each has no NaN and no magnitude above LARGEST_VALUE: (sound_S,), on their device,
    without waiting."""
    low_S, high_S = torch.stack([tensor.detach().reshape(-1) for tensor in tensors]).aminmax(dim=1)
    return (torch.maximum(low_S.neg_(), high_S).float() <= LARGEST_VALUE,)


def _to_host(far_M: Tensor) -> Tensor:
    """Copy to the host, and wait for it. From a card it goes to pinned memory, which needs no intermediate buffer of the driver."""
    if far_M.device.type != "cuda":
        return far_M.cpu()
    near_M = far_M.to("cpu", non_blocking=True)
    torch.accelerator.current_stream(far_M.device).synchronize()
    return near_M


class DeviceInputs:
    """Inputs of one pass on their way to the device: `add` them all, and the first call of `tensor` sends them.

    Token ids stay on the host, which checks them first. On a card, payloads with one descriptor are decoded together. If `dtype`
    is given, floats are converted to it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._parts: list[tuple[TensorInfo, Buffer]] = []
        self._sent: dict[int, Tensor] | None = None
        self._decoded: dict[int, Tensor] = {}

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
        if number in self._decoded:
            return self._decoded[number]
        if number in self._sent:
            return self._converted(decode_in_place(info, self._sent[number]))
        if info.dtype not in FLOAT_DTYPES:
            return decode(info, payload)
        return self._converted(decode(info, payload, device=self._device))

    def _converted(self, x: Tensor) -> Tensor:
        return x if self._dtype is None else x.to(self._dtype)

    def _send(self) -> dict[int, Tensor]:
        """Send the float payloads to a card in one copy, those with one descriptor side by side. Returns payload_M (uint8) by
        number, apart from those that were decoded together; empty on other devices."""
        if self._device.type != "cuda":
            return {}
        alike: dict[tuple[TensorInfo, int], list[int]] = {}
        for number, (info, payload) in enumerate(self._parts):
            if info.dtype in FLOAT_DTYPES:
                alike.setdefault((info, memoryview(payload).nbytes), []).append(number)
        if not alike:
            return {}
        whole = sum(len(numbers) * _stride(size) for (_, size), numbers in alike.items())
        pinned_M = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
        gathered = pinned_M.numpy().data
        groups: list[tuple[TensorInfo, list[int], slice, int]] = []
        end = 0
        for (info, size), numbers in alike.items():
            begin = end
            for number in numbers:
                gathered[end : end + size] = memoryview(self._parts[number][1]).cast("B")
                end += _stride(size)
            groups.append((info, numbers, slice(begin, end), size))
        far_M = pinned_M.to(self._device, non_blocking=True)
        sent: dict[int, Tensor] = {}
        for info, numbers, place, size in groups:
            rows_SM = far_M[place].view(len(numbers), _stride(size))[:, :size]
            if len(numbers) > 1 and _is_sound(info, size) and goes_together(info):
                self._decoded.update(zip(numbers, self._converted(decode_alike(info, rows_SM)), strict=True))
            else:
                sent.update(zip(numbers, rows_SM, strict=True))
        return sent


def _stride(size: int) -> int:
    """Return the bytes from one payload of `size` bytes to the next."""
    return size + -size % ALIGNMENT_BYTES


def _is_sound(info: TensorInfo, size: int) -> bool:
    """Return whether a payload's descriptor is allowed and implies its size."""
    try:
        return check_tensor(info, MAX_ELEMENTS) == size
    except ProtocolError:  # is raised again for each input
        return False
