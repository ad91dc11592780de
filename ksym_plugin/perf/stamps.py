"""When samples were taken, in CLOCK_MONOTONIC."""

from __future__ import annotations

from ksym_plugin.kernel.clocks import clock_of_attr
from ksym_plugin.perf.output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from ksym_plugin.kernel.clocks import ClockMap

#: A time that nothing covers.
_OUTSIDE: Final = -1
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME: Final = 1 << 63


class Stamps:
    """The times of samples; each event may be on a clock of its own.

    ``clock`` is that of all samples where the user says so, else each event's attr tells.
    """

    def __init__(self, clock: str | None, clock_map: ClockMap | None) -> None:
        self._clock = clock
        self._clock_map = clock_map
        self._clocks: dict[str, str | None] = {}
        self._has_said = False

    def monotonic(self, event: dict[str, Any]) -> int:
        """CLOCK_MONOTONIC ns; before everything if it is not known."""
        name = str(event.get("ev_name"))
        clock = self._clocks.get(name, "")
        if clock == "":
            clock = self._clocks[name] = self._clock_of(event)
        stamp = event["sample"].get("time") or 0
        if not 0 < stamp < _NO_TIME or clock is None or self._clock_map is None:
            return _OUTSIDE
        return self._clock_map.to_monotonic(clock, stamp)

    def _clock_of(self, event: dict[str, Any]) -> str | None:
        """The clock of an event's samples, None (said once) if times on it mean nothing here."""
        clock = self._clock or clock_of_attr(event.get("attr") or b"")
        if self._clock_map is None:
            return clock
        if clock is not None and self._clock_map.knows(clock):
            return clock
        if not self._has_said:
            self._has_said = True
            say(
                f"samples of {event.get('ev_name')} are on a clock that the history cannot place,"
                " so BPF frames stay as perf has them; record with: perf record -k CLOCK_MONOTONIC"
            )
        return None
