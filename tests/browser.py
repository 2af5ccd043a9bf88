"""A real Chromium without a window, spoken to over pipes in its own DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars")


class Page:
    """A tab. `events` are all that the browser has told so far, in order."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file, to its end, in a window of that size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[dict[str, Any]]:
        """Whatever the console shows."""
        spoken = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event["method"] in spoken]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            read = os.read(self._from, 1 << 16)
            assert read, "the browser has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a fresh browser, which ends with the context."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, f"no browser: install one of {', '.join(NAMES)}"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # It reads from descriptor 3 and writes to 4; the shell puts them there whatever their numbers are here.
    script = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            process.kill()
            process.wait()
            os.close(to_write)
            os.close(from_read)
