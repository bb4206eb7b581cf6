"""Chromium, led over the pipes of its DevTools protocol: a browser for tests, without a driver or a port of its own."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from swarmnode.net.libp2p.daemon import die_with_parent

TIMEOUT_S = 120.0  # of what hangs; nothing is to be fast
SPARE = 10  # descriptors from here on are nobody's by convention
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
}  # their codes, and what they write: a form is sent by that
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it sees this machine's pages alone, and may run as root
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find_chromium() -> str | None:
    """The program, where it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One browser: `with Chromium(program, folder) as browser: page = browser.open(url)`."""

    def __init__(self, program: str, folder: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, SPARE) for end in (to_read, to_write)]

        def attach() -> None:
            die_with_parent()
            for end, number in zip(ends, (3, 4), strict=True):  # where Chromium looks for them
                os.dup2(end, number)

        self._numbers = itertools.count(1)
        self._held = b""
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=attach,
        )
        for end in (to_read, to_write, *ends):
            os.close(end)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def __repr__(self) -> str:
        return f"<Chromium pid {self._process.pid}>"

    def open(self, url: str) -> BrowserPage:
        """A tab with this address."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = BrowserPage(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Page.navigate", {"url": url})
        return page

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """The result of a command. Raises RuntimeError where there is none."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters or {}}
        if session is not None:
            command["sessionId"] = session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            told = self._next(deadline_s)
            if told.get("id") != number:
                self.events.append(told)
            elif "error" in told:
                raise RuntimeError(f"{method}: {told['error']}")
            else:
                return told["result"]

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._read], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise RuntimeError("Chromium does not answer")
            came = os.read(self._read, 1 << 20)
            if not came:
                raise RuntimeError("Chromium has ended")
            self._held += came
        message, self._held = self._held.split(b"\0", 1)
        told = json.loads(message)
        assert isinstance(told, dict)
        return told


class BrowserPage:
    """A tab."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> Any:
        """As `Chromium.call`, of this tab."""
        return self._browser.call(method, parameters, self._session)

    def complaints(self) -> list[str]:
        """What scripts and the policy complained of so far."""
        found = []
        for event in self._browser.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["source"] in (
                "security",
                "javascript",
            ):
                found.append(str(event["params"]["entry"]["text"]))
        return found

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is. Raises RuntimeError."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        told = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails'].get('exception', told['exceptionDetails'])}")
        return told["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """Its value, as soon as that is true. Raises RuntimeError."""
        look = f"""new Promise((resolve, reject) => {{
            const until = performance.now() + {1000 * TIMEOUT_S / 2};
            const look = () => {{
                let value;
                try {{ value = {expression}; }} catch (error) {{ value = null; }}
                if (value) resolve(value);
                else if (performance.now() > until) reject(new Error("it never became true"));
                else setTimeout(look, 30);
            }};
            look();
        }})"""
        return self.evaluate(look)

    def type_and_enter(self, selector: str, text: str) -> None:
        """By the keyboard, into the field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", {"text": text})
        self.press("Enter")

    def press(self, key: str) -> None:
        """A key of those that are named below."""
        code, text = KEYS[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **pressed, **({"text": text} if text else {})})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **pressed})

    def resize(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Let the window be as large, in pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, path: Path) -> None:
        """Write what is to be seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", {"format": "png"})["data"]))
