"""The viewers that people open profiles with, in a headless browser.

``scripts/setup browser`` installs them from npm into build/viewers.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.unit import chromium

#: How much each stack weighs; its frames are root first.
Stacks = dict[tuple[str, ...], float]

_PACKAGES = Path(__file__).parents[2] / "build" / "viewers" / "node_modules"
SPEEDSCOPE = _PACKAGES / "speedscope" / "dist" / "release"
#: Saving a file is how speedscope's page tells what it has read: the test takes the file.
_TAKE_FILES = """
window.saved = null;
{
  const create = URL.createObjectURL;
  URL.createObjectURL = blob => {
    if (blob.type === "text/json") blob.text().then(text => { window.saved = text; });
    return create.call(URL, blob);
  };
  HTMLAnchorElement.prototype.click = () => {};
}
true"""


class Speedscope:
    """speedscope's page, as its own command opens it."""

    def __init__(self, browser: chromium.Chromium) -> None:
        self._browser = browser

    def read(self, name: str, data: bytes) -> dict[str, Stacks]:
        """What it makes of a file: the stacks of each profile, by the profile's name."""
        document = self._saved(name, data)
        frames = document["shared"]["frames"]
        return {
            profile["name"]: _stacks(profile["events"], [frame["name"] for frame in frames])
            for profile in document["profiles"]
        }

    def _saved(self, name: str, data: bytes) -> dict[str, Any]:
        """The document that it saves of what it has read; its profiles are of events."""
        script = json.dumps([name, base64.b64encode(data).decode()])
        with tempfile.NamedTemporaryFile("w", suffix=".js") as file:
            file.write(f"speedscope.loadFileFromBase64(...{script})")
            file.flush()
            # Another "#..." alone would not load the page again.
            self._browser.call("Page.navigate", url="about:blank")
            self._browser.wait("location.href === 'about:blank'")
            self._browser.open(f"{SPEEDSCOPE.as_uri()}/index.html#localProfilePath={file.name}")
            self._browser.wait("document.title.endsWith(' - speedscope')")
            self._browser.ask(_TAKE_FILES)
            self._browser.press("s", ctrl=True)
            self._browser.wait("window.saved")
        document: dict[str, Any] = json.loads(self._browser.ask("window.saved"))
        return document


def _stacks(events: list[dict[str, Any]], names: list[str]) -> Stacks:
    """Frames open and close; between two times those that are open are a stack."""
    found: Stacks = {}
    opened: list[str] = []
    since = 0
    for event in events:
        if event["at"] != since and opened:
            stack = tuple(opened)
            found[stack] = found.get(stack, 0) + event["at"] - since
        since = event["at"]
        if event["type"] == "O":
            opened.append(names[event["frame"]])
        else:
            assert opened.pop() == names[event["frame"]]
    return found
