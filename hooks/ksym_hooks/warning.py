"""Warnings about plugins that fail."""

from __future__ import annotations

import threading
import warnings


class PluginWarning(UserWarning):
    """A plugin was passed over, or its answers are worth less than usual.

    Once for each plugin and manager: it goes on being passed over in silence. The plugin
    is named; mend it, or leave it out with ``KSYM_DISABLE_PLUGINS=NAME``.
    """


class Complaints:
    """Warns once about each plugin."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._lock = threading.Lock()

    def about(self, name: str, problem: str) -> None:
        with self._lock:
            if name in self._named:
                return
            self._named.add(name)
        warnings.warn(f"ksym plugin {name}: {problem}", PluginWarning, stacklevel=2)
