"""Frames as they are spelled, kept by address: a profile has the same ones again and again."""

from __future__ import annotations

from ksym_plugin.perf.namer import count, strip_nul
from ksym_plugin.timeline.symbols import EXACT, MODULE, Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.perf.namer import Tally
    from ksym_plugin.perf.session import Live
    from ksym_plugin.timeline.symbols import Reason


class CoreFrames:
    """Spellings of frames at addresses that neither BPF nor a module ever held.

    ``leaves`` are those of samples' first frames, which with source lines differ from
    ``callers`` at the same address; else both are one.
    """

    __slots__ = ("_inlined", "callers", "leaves", "met")

    def __init__(self, with_lines: bool) -> None:
        self.callers: dict[int, str] = {}
        self.leaves: dict[int, str] = {} if with_lines else self.callers
        #: Those met in the sample at hand: its name, whether it is the leaf, its spelling.
        self.met: dict[int, tuple[object, bool, str]] = {}
        #: Addresses that stand for several frames.
        self._inlined: set[int] = set()

    def is_inlined_into(self, address: int, name: object) -> bool:
        """Whether another function was met at this address: it is inlined into this one."""
        first = self.met.get(address)
        return first is not None and first[0] != name

    def meet(self, address: int, name: object, is_leaf: bool, piece: str) -> None:
        """A frame of the sample at hand; ``name`` tells functions at one address apart."""
        if self.met.setdefault(address, (name, is_leaf, piece))[0] != name:
            self._inlined.add(address)

    def keep(self, has_chain: bool) -> None:
        """Keep the frames of a sample that has ended.

        Not where an address has several spellings: perf expands inlined functions to
        frames with one address, all of them in a callchain and none without.
        """
        if has_chain:
            for address, (_, is_leaf, piece) in self.met.items():
                if address not in self._inlined:
                    (self.leaves if is_leaf else self.callers)[address] = piece
        self.met.clear()

    def forget(self) -> None:
        """Keep nothing of the sample at hand."""
        self.met.clear()


class PassingFrames:
    """Frames of BPF and of modules that the history is sure of, each for as long as it is."""

    __slots__ = ("_kept", "_past", "_tally")

    def __init__(self, past: BootHistory | Live | None, tally: Tally) -> None:
        self._past = past
        self._tally = tally
        self._kept: dict[int, _Repeated] = {}

    def again(self, node: dict[str, Any], time_ns: int) -> str | None:
        """A frame that came before and cannot have changed since, if perf says the same of it."""
        repeated = self._kept.get(node["ip"])
        if repeated is None or not repeated.since <= time_ns <= repeated.until:
            return None
        symbol = node.get("sym")
        if (symbol["name"] if symbol else "") != repeated.symbol:
            return None
        if (node.get("dso") or "") != repeated.dso:
            return None
        repeated.times += 1
        return repeated.piece

    def remember(
        self, node: dict[str, Any], answer: Frame | Reason, held: Frame | str, piece: str
    ) -> None:
        """Keep a frame if it may come again: ``held`` is the history's answer, or perf's name."""
        if not isinstance(answer, Frame) or answer.lifetime is None or self._past is None:
            return
        if answer.certainty != EXACT or (held is not answer and answer.kind != MODULE):
            return
        frame = held if isinstance(held, Frame) else None
        address, symbol = node["ip"], node.get("sym")
        since, until = self._past.steady(address)
        if since < until:
            before = self._kept.get(address)
            if before is not None:
                before.settle(self._tally)
            name, dso = symbol["name"] if symbol else "", node.get("dso") or ""
            self._kept[address] = _Repeated(since, until, name, dso, frame, piece)

    def settle(self) -> None:
        """Count what came again, each time once."""
        for repeated in self._kept.values():
            repeated.settle(self._tally)


class _Repeated:
    """A frame that is as it was the last time, from ``since`` to ``until``.

    So it is, if perf says the same of it: ``symbol`` and ``dso``. ``frame`` is None where
    perf's name stood. ``times`` counts how often it came again; the tally is told at the end.
    """

    __slots__ = ("dso", "frame", "piece", "since", "symbol", "times", "until")

    def __init__(
        self, since: int, until: int, symbol: str, dso: str, frame: Frame | None, piece: str
    ) -> None:
        self.since = since
        self.until = until
        self.symbol = symbol
        self.dso = dso
        self.frame = frame
        self.piece = piece
        self.times = 0

    def settle(self, tally: Tally) -> None:
        if self.frame is None:
            tally.confirmed += self.times
        else:
            count(self.frame, strip_nul(self.symbol), tally, self.times)
        self.times = 0
