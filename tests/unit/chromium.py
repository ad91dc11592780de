"""A headless Chromium, driven over its debugging pipe: JSON messages, each ended by a NUL.

``--remote-debugging-pipe`` has it read descriptor 3 and write descriptor 4 (the protocol is
https://chromedevtools.github.io/devtools-protocol/), so that neither a driver nor a
WebSocket is needed. Keys and clicks sent this way are what a user's are to a page.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any

SECONDS = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_CTRL = 2


class Failed(Exception):
    pass


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser with one page, ``width`` pixels wide."""

    def __init__(self, width: int = 1200, height: int = 800) -> None:
        self._profile = tempfile.mkdtemp(prefix="ksym-chromium-")
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        size = f"--window-size={width},{height}"
        line = [str(find()), *FLAGS, size, f"--user-data-dir={self._profile}", "about:blank"]
        # The shell gives the two pipes the numbers that Chromium wants them to have.
        script = f'exec "$@" 3<&{commands_read} 4>&{answers_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *line],
            pass_fds=(commands_read, answers_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_read)
        os.close(answers_write)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            self.call("Page.enable")
            self.call("Runtime.enable")
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
        except BaseException:
            self.close()
            raise
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._message(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise Failed(f"Chromium does not answer within {SECONDS:.0f} s")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise Failed("Chromium went away")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    # A page

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.call("Network.enable")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise Failed(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + SECONDS
        while not self.ask(condition):
            if time.monotonic() > until:
                raise Failed(f"never true: {condition}")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, ctrl: bool = False) -> None:
        code = {"f": 70, "s": 83, "Escape": 27}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                modifiers=_CTRL if ctrl else 0,
            )

    def picture(self, path: str) -> None:
        shot = self.call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
