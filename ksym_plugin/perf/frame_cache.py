"""Pieces of the output, cached by address: a profile has the same ones again and again."""

from __future__ import annotations

from ksym_plugin.perf.namer import count
from ksym_plugin.timeline.symbols import EXACT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.perf.namer import Tally
    from ksym_plugin.perf.output import Piece
    from ksym_plugin.timeline.symbols import Frame


class LifetimeFrames:
    """Pieces of frames of BPF and of modules, each for as long as nothing changes where it is.

    The history tells how long that is; without one nothing is cached. What came again is
    counted at the end: a call for each frame would cost too much.
    """

    __slots__ = ("_cached", "_history", "_tally")

    def __init__(self, history: BootHistory | None, tally: Tally) -> None:
        self._history = history
        self._tally = tally
        self._cached: dict[int, _Cached] = {}

    def find(self, node: dict[str, Any], time_ns: int) -> Piece | None:
        """The piece of a frame of perf's callchain that came before, if it must be the same."""
        cached = self._cached.get(node["ip"])
        if cached is None or not cached.since <= time_ns <= cached.until:
            return None
        symbol = node.get("sym")
        if (symbol["name"] if symbol else None) != cached.symbol or node.get("dso") != cached.dso:
            return None
        cached.times += 1
        return cached.piece

    def keep(self, node: dict[str, Any], decision: Frame, name: str, piece: Piece) -> None:
        """Keep a frame that the history gave, against perf's ``name``."""
        if self._history is None or decision.lifetime is None or decision.certainty != EXACT:
            return
        address, symbol = node["ip"], node.get("sym")
        since, until = self._history.validity(address)
        if since < until:
            before = self._cached.get(address)
            if before is not None:
                self._count(before)
            cached = self._cached[address] = _Cached(since, until, decision, name, piece)
            cached.symbol, cached.dso = symbol["name"] if symbol else None, node.get("dso")

    def close(self) -> None:
        """Count what came again."""
        for cached in self._cached.values():
            self._count(cached)

    def _count(self, cached: _Cached) -> None:
        count(cached.decision, cached.name, self._tally, cached.times)
        cached.times = 0


class _Cached:
    """A frame that is the same from ``since`` to ``until`` (CLOCK_MONOTONIC ns), if perf has
    the same ``symbol`` and ``dso`` for it; ``times`` counts how often it came again."""

    __slots__ = ("decision", "dso", "name", "piece", "since", "symbol", "times", "until")

    def __init__(self, since: int, until: int, decision: Frame, name: str, piece: Piece) -> None:
        self.since = since
        self.until = until
        self.decision = decision
        self.name = name
        self.piece = piece
        self.symbol: str | None = None
        self.dso: str | None = None
        self.times = 0
