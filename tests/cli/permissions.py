"""Files and folders as somebody meets them who is not root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator

import pytest

VERSION_3 = 0x20080522  # of the kernel's structures
OVERRIDE = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root read and write everything


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Permissions hold for this thread, root's too, while the context lasts."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root cannot give up its rights here")
    libc, header, held = ctypes.CDLL(None), _Header(VERSION_3, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), held) == 0
    before = held[0].effective
    held[0].effective = before & ~OVERRIDE
    assert libc.capset(ctypes.byref(header), held) == 0
    try:
        yield
    finally:
        held[0].effective = before
        assert libc.capset(ctypes.byref(header), held) == 0


@contextlib.contextmanager
def on_a_full_disk(left_bytes: int) -> Iterator[None]:
    """No file can be longer than this while the context lasts: the system refuses the rest, as it does where a disk is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
