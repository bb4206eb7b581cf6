"""A private session bus with a desktop on it, which keeps the notices that it is sent (D-Bus specification, version 0.43)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from swarmnode.lending.rule_watch import SESSION_BUS

CALL, RETURN = 1, 2
PATH, INTERFACE, MEMBER, REPLY_SERIAL, DESTINATION, SENDER, SIGNATURE = 1, 2, 3, 5, 6, 7, 8
BUS = "org.freedesktop.DBus"
NOTIFICATIONS = "org.freedesktop.Notifications"


class Notice(NamedTuple):
    """A notice as the desktop got it, and the id of the one that it replaces."""

    replaces: int
    title: str
    text: str


class Desktop:
    """Desktop that answers on a session bus."""

    def __init__(self, socket_path: str) -> None:
        self.notices: list[Notice] = []
        self._serial = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(socket_path)
        self._socket.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        assert self._socket.recv(4096).startswith(b"OK")
        self._socket.sendall(b"BEGIN\r\n")
        self._reader = self._socket.makefile("rb")
        self._call_bus("Hello", "", b"")
        name = _string(NOTIFICATIONS)
        self._call_bus("RequestName", "su", name + bytes(_aligned(len(name), 4) - len(name)) + struct.pack("<I", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Leave the bus."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _call_bus(self, member: str, signature: str, body: bytes) -> None:
        fields = {PATH: ("o", "/org/freedesktop/DBus"), INTERFACE: ("s", BUS), MEMBER: ("s", member)}
        self._send(CALL, {**fields, DESTINATION: ("s", BUS)}, signature, body)
        while self._read()[0] != RETURN:
            continue

    def _serve(self) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            while True:
                kind, serial, fields, body = self._read()
                if kind == CALL and fields.get(MEMBER) == "Notify":
                    _, offset = _read_string(body, 0)
                    replaces = int(struct.unpack_from("<I", body, _aligned(offset, 4))[0])
                    _, offset = _read_string(body, _aligned(offset, 4) + 4)
                    title, offset = _read_string(body, offset)
                    text, _ = _read_string(body, offset)
                    self.notices.append(Notice(replaces, title, text))
                    told = {REPLY_SERIAL: ("u", serial), DESTINATION: ("s", fields[SENDER])}
                    self._send(RETURN, told, "u", struct.pack("<I", len(self.notices)))

    def _send(self, kind: int, fields: dict[int, tuple[str, object]], signature: str, body: bytes) -> None:
        self._serial += 1
        if signature:
            fields = {**fields, SIGNATURE: ("g", signature)}
        packed = b""
        for code, (of_type, value) in fields.items():
            packed += b"\0" * (-len(packed) % 8) + bytes([code, 1]) + of_type.encode() + b"\0"
            packed += b"\0" * (-len(packed) % (1 if of_type == "g" else 4))
            if of_type == "u":
                packed += struct.pack("<I", value)
            elif of_type == "g":
                packed += bytes([len(str(value))]) + str(value).encode() + b"\0"
            else:
                packed += _string(str(value))
        header = b"l" + bytes([kind, 0, 1]) + struct.pack("<III", len(body), self._serial, len(packed)) + packed
        self._socket.sendall(header + b"\0" * (-len(header) % 8) + body)

    def _read(self) -> tuple[int, int, dict[int, str], bytes]:
        """Return kind, serial, the header's texts by code, and body of the next message."""
        head = self._reader.read(16)
        body_bytes, serial, fields_bytes = struct.unpack("<III", head[4:16])
        raw = self._reader.read(_aligned(fields_bytes, 8))
        body = self._reader.read(body_bytes)
        fields: dict[int, str] = {}
        offset = 0
        while offset < fields_bytes:
            code, of_type = raw[offset], chr(raw[offset + 2])
            offset += 4
            if of_type == "g":
                offset += 2 + raw[offset]
            elif of_type == "u":
                offset = _aligned(offset, 4) + 4
            else:
                fields[code], offset = _read_string(raw, offset)
            offset = _aligned(offset, 8)
        return head[1], serial, fields, body


def _aligned(offset: int, to: int) -> int:
    return offset + -offset % to


def _string(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode() + b"\0"


def _read_string(raw: bytes, offset: int) -> tuple[str, int]:
    """Return the text at `offset` and the offset behind it."""
    offset = _aligned(offset, 4)
    (length,) = struct.unpack_from("<I", raw, offset)
    return raw[offset + 4 : offset + 4 + length].decode(), offset + 4 + length + 1


@contextlib.contextmanager
def session_bus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desktop]:
    """Run a private bus with a desktop while the context lasts. Skips the test without dbus-daemon or busctl."""
    if not shutil.which("dbus-daemon") or not shutil.which("busctl"):
        pytest.skip("dbus-daemon and busctl are needed")
    path = folder / "bus"
    command = ["dbus-daemon", "--session", "--nofork", "--print-address=1", f"--address=unix:path={path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            monkeypatch.setenv(SESSION_BUS, daemon.stdout.readline().strip())
            desktop = Desktop(str(path))
            yield desktop
            desktop.close()
        finally:
            daemon.terminate()
