"""What is known of the time a perf.data was recorded in: a history, or the live system."""

from __future__ import annotations

from ksym_plugin.history import locate
from ksym_plugin.history.reader import History
from ksym_plugin.kernel import identity
from ksym_plugin.perf.output import say
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import OUTSIDE_HISTORY, UNKNOWN_ADDRESS
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.history.reader import Boot, Past
    from ksym_plugin.kernel.clocks import ClockMap
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.timeline.location import Lines
    from ksym_plugin.timeline.packed import Line
    from ksym_plugin.timeline.symbols import Lifetime
    from ksym_plugin.timeline.timeline import Answer


class Known:
    """``past`` and ``clock_map`` are None where nothing is known; then perf's names stand."""

    def __init__(self, is_this_boot: bool) -> None:
        #: Whether the data can be of the running kernel.
        self.is_this_boot = is_this_boot
        self.past: Past | Live | None = None
        self.clock_map: ClockMap | None = None
        #: The source lines of BPF programs.
        self.lines: Lines = _NoLines()
        #: The boot in the history, if there is one.
        self.boot: Boot | None = None
        self._history: History | None = None

    def adopt(self, history: History, recorded: Recorded) -> None:
        """Take the record of the boot that the data is from; the history is ours to close."""
        boot = locate.choose_boot(
            history,
            identity.boot_id(),
            recorded.build_id,
            recorded.release,
            recorded.host,
            recorded.text_start,
        )
        # Without a header anything would fit; a live pipe is of this boot, if of any.
        told = (recorded.build_id, recorded.release, recorded.host, recorded.text_start)
        anonymous = all(fact is None for fact in told)
        if boot is not None and anonymous and boot.boot_id != identity.boot_id():
            boot = None
        self.past = locate.record_of(history, boot, "perf.data", say)
        self.clock_map = self.past.clock_map()
        self.lines = self.past.programs
        self.boot = boot
        self._history = history

    def ask_live(self) -> None:
        """Without a history: what is loaded now was there ever since it was loaded."""
        if not self.is_this_boot:
            say("no history, and the data is of another boot: BPF frames stay as perf has them")
            return
        from ksym_plugin.kernel import snapshot
        from ksym_plugin.kernel.bpf_lines import LiveLines
        from ksym_plugin.kernel.clocks import ClockMap, PerfClock

        try:
            loads = snapshot.take().loads
        except KsymError as error:
            say(f"no history, and the live system does not tell: {error}")
            return
        say("no history: only BPF programs that are still loaded can be named")
        timeline = Timeline()
        for load in loads:
            timeline.apply(load)
        clock = PerfClock()
        try:
            self.clock_map = ClockMap([clock.read()])
        finally:
            clock.close()
        self.past = Live(timeline)
        self.lines = LiveLines()

    def close(self) -> None:
        if self._history is not None:
            self._history.close()


def find(explicit: str | None, data_path: str | None, recorded: Recorded) -> Known:
    """What there is; KsymError if a history is there and cannot be used."""
    known = Known(_is_this_boot(recorded))
    path = locate.find(explicit, data_path)
    if path is None:
        known.ask_live()
        return known
    history = History(path)
    try:
        known.adopt(history, recorded)
    except BaseException:
        history.close()
        raise
    return known


class _NoLines:
    """Of nothing there are none."""

    __slots__ = ()

    def line(self, _lifetime: Lifetime, _offset: int, /) -> Line | None:
        return None

    def traced(self, _lifetime: Lifetime, /) -> str | None:
        return None


class Live:
    """What is loaded now, and since when: of what was there before, nothing is known."""

    __slots__ = ("_timeline",)
    has_modules = False

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @property
    def extent(self) -> int:
        return self._timeline.extent

    def steady(self, _address: int) -> tuple[int, int]:
        return 0, -1

    def at(self, address: int, time_ns: int, /) -> Answer:
        answer = self._timeline.at(address, time_ns)
        if answer[0] is None and answer[1] is not UNKNOWN_ADDRESS:
            return None, OUTSIDE_HISTORY
        return answer


def _is_this_boot(recorded: Recorded) -> bool:
    """Whether a perf.data can be of the running kernel; one without a header may well be."""
    here = (identity.build_id(), identity.release(), identity.hostname(), identity.start())
    there = (recorded.build_id, recorded.release, recorded.host, recorded.text_start)
    return all(has is None or had is None or has == had for has, had in zip(here, there))
