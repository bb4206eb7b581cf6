"""A simulated CUDA device (`simulated.cpp`), as a pytest plugin: two cards for the process that loads it, and for no other."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import pytest
import torch

from tests.card.simulated_graph import SimulatedGraph, Waiting, graph_answers

SOURCE = Path(__file__).with_name("simulated.cpp")
CARDS = 2
TOTAL_BYTES = 8 << 30
BUILD_S = 1800.0  # of a compiler that hangs


class CannotBuild(Exception):
    """Why there is no simulated card here."""


class Counts(NamedTuple):
    """What one card did since it was last reset; `launches` are of operators, and copies."""

    launches: int
    uploads: int
    downloads: int
    waits: int
    used_bytes: int
    peak_bytes: int


def library_path() -> Path:
    """The library, built where this source and this torch have none yet. Raises CannotBuild."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("there is no C++ compiler on this machine to build a simulated card with")
    text = SOURCE.read_bytes() + f"{torch.__version__} {sys.platform}".encode()
    folder = Path(platformdirs.user_cache_dir("swarmnode-tests"))
    built = folder / f"card-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(compiler, built)
    return built


def _build(compiler: str, built: Path) -> None:
    headers, part = Path(torch.__file__).parent, built.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
    command += [f"-I{headers / 'include'}", f"-L{headers / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"torch {torch.__version__} has other private interfaces: {lines[:1]}")
    part.replace(built)


class SimulatedCards:
    """The cards of this process. Their time is virtual: it passes by launching `paced` work and waiting for it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.card_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.card_launched.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.card_pace.argtypes = [ctypes.c_double]
        library.card_now.restype = ctypes.c_double
        self.majors = [8] * CARDS  # compute capabilities
        self.touched: set[int] = set()  # cards that were asked for anything that makes a context

    def __repr__(self) -> str:
        return f"<SimulatedCards {[self.counts(card) for card in range(CARDS)]}>"

    def counts(self, card: int) -> Counts:
        """Since the last reset; memory is what is used now, and the peak since then."""
        out = (ctypes.c_int64 * len(Counts._fields))()
        self._library.card_counts(card, out)
        return Counts(*out)

    def reset(self) -> None:
        """Count anew, without limits, on cards that have their contexts."""
        for card in range(CARDS):
            self._library.card_reset(card)
            self.limit(card, 1 << 62)
        self.use(0)
        self.lose(False)
        self.on_waiting(Waiting.GOES)
        self.pace(0.0)
        self.majors = [8] * CARDS
        self.touched.clear()

    @contextmanager
    def as_one_launch(self) -> Iterator[None]:
        """Count a block's launches on each card as one."""
        before = [self.counts(card).launches for card in range(CARDS)]
        yield
        for card, launches in enumerate(before):
            if self.counts(card).launches > launches:
                self._library.card_launched(card, launches + 1)

    def lose(self, is_lost: bool = True) -> None:
        """The context, as by an assertion that failed in a kernel; it shows when somebody launches or waits next."""
        self._library.card_lose(is_lost)

    def on_waiting(self, outcome: Waiting) -> None:
        """From now on."""
        self._library.card_waiting(outcome)

    def limit(self, card: int, size_bytes: int) -> None:
        """Memory that the card has from now on."""
        self._library.card_limit(card, size_bytes)

    def pace(self, launch_s: float) -> None:
        """What each launch takes of the card's time."""
        self._library.card_pace(launch_s)

    def clock(self) -> float:
        """Virtual seconds."""
        return float(self._library.card_now())

    @property
    def current(self) -> int:
        """The card of this thread."""
        return int(self._library.card_current())

    def use(self, card: int) -> None:
        """Of this thread, from now on."""
        self._library.card_use(card)


class _Properties:
    """Of a card, as torch tells them."""

    gcnArchName = ""
    minor = 0
    multi_processor_count = 8
    total_memory = TOTAL_BYTES

    def __init__(self, index: int, major: int) -> None:
        self.major, self.name, self.uuid = major, f"Simulated card {index}", f"simulated-{index}"


class _Generator:
    """Of a card: the CPU's kernels draw from the CPU's."""

    def __init__(self, index: int, touched: set[int]) -> None:
        self._index, self._touched = index, touched

    def manual_seed(self, seed: int) -> None:
        self._touched.add(self._index)
        torch.default_generator.manual_seed(seed)


def load() -> SimulatedCards:
    """Give this process its cards, for good. Raises CannotBuild."""
    cards = SimulatedCards(ctypes.CDLL(str(library_path())))

    def index_of(device: Any = None) -> int:
        if device is None:
            return cards.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return cards.current if index is None else index

    def touching(answer: Callable[[int], Any]) -> Callable[..., Any]:
        def asked(device: Any = None) -> Any:
            cards.touched.add(index_of(device))
            return answer(index_of(device))

        return asked

    def synchronize(device: Any = None) -> None:
        cards.touched.add(index_of(device))
        torch._C._accelerator_synchronizeDevice(index_of(device))

    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or cards.majors[cards.current] >= 8,
        "device_count": lambda: CARDS,
        "current_device": lambda: cards.current,
        "set_device": lambda device: cards.use(index_of(device)),
        "get_device_properties": lambda device=None: _Properties(index_of(device), cards.majors[index_of(device)]),
        "get_device_capability": lambda device=None: (cards.majors[index_of(device)], 0),
        "get_device_name": lambda device=None: f"Simulated card {index_of(device)}",
        "mem_get_info": touching(lambda card: (TOTAL_BYTES - cards.counts(card).used_bytes, TOTAL_BYTES)),
        "memory_allocated": lambda device=None: cards.counts(index_of(device)).used_bytes,
        "max_memory_allocated": lambda device=None: cards.counts(index_of(device)).peak_bytes,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: cards.touched.update(range(CARDS)),
        "get_rng_state": touching(lambda _card: torch.get_rng_state()),
        "set_rng_state": lambda state, device="cuda": cards.touched.add(index_of(device)),
    }
    for name, answer in {**answers, **graph_answers(cards.on_waiting)}.items():
        setattr(torch.cuda, name, answer)
    SimulatedGraph.counted = cards.as_one_launch
    torch.cuda.default_generators = tuple(_Generator(card, cards.touched) for card in range(CARDS))
    return cards


LOADED: list[SimulatedCards] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the tests are collected, which are others where there is a card."""
    LOADED.append(load())
