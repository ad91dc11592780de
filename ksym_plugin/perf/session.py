"""When samples were taken, in CLOCK_MONOTONIC."""

from __future__ import annotations

import os
import sys

from ksym_plugin.history import locate
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import clock_of_attr
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf.output import say
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import OUTSIDE_HISTORY, UNKNOWN_ADDRESS
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ksym_plugin.history.reader import Boot, BootHistory
    from ksym_plugin.kernel.clocks import ClockMap
    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.elf import Image
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.timeline.location import Lines
    from ksym_plugin.timeline.packed import Line
    from ksym_plugin.timeline.symbols import Lifetime
    from ksym_plugin.timeline.timeline import Answer


#: Where the package ``elftools`` is; set by ``ksym script``, whose Python has it.
VARIABLE = "KSYM_ELFTOOLS"


def opened(path: str, recorded: Recorded, known: Session) -> Image | None:
    """The image of the kernel that a perf.data is of; None, and said why, without pyelftools.

    ElfError if the file is of another kernel, or where that kernel lay is not known.
    """
    problem = _load_elftools()
    if problem:
        say(
            f"{path} is not read, as pyelftools cannot be used ({problem});"
            " run ksym script, or install it for this Python (Debian: python3-pyelftools)"
        )
        return None
    from ksym_plugin.kernel.elf import ElfFile, Image

    build_id, text_start = recorded.build_id, recorded.text_start
    if known.boot is not None:
        build_id = build_id or known.boot.build_id
        text_start = text_start or known.boot.text_start
    if known.is_this_boot:
        build_id = build_id or identity.build_id()
        text_start = text_start or identity.start()
    image = Image(ElfFile.kept(path), text_start, build_id, _kallsyms(known))
    if build_id is None or image.file.build_id is None:
        say(f"without a build id there is no telling whether {path} is of this very kernel")
    return image


def _kallsyms(known: Session) -> Kallsyms | None:
    """The running kernel's own table, if the data is of it."""
    try:
        return Kallsyms.load() if known.is_this_boot else None
    except KsymError as error:
        say(str(error))
        return None


def _load_elftools() -> str:
    """Make pyelftools importable; why that is not possible, or nothing.

    From the folder it is given it loads that package alone: what else lies beside it is
    another Python's.
    """
    folder = os.environ.get(VARIABLE)
    try:
        if folder and "elftools" not in sys.modules:
            from importlib.util import module_from_spec, spec_from_file_location

            place = os.path.join(folder, "__init__.py")
            spec = spec_from_file_location("elftools", place, submodule_search_locations=[folder])
            if spec is None or spec.loader is None:
                return f"{folder} is no package"
            package = sys.modules["elftools"] = module_from_spec(spec)
            spec.loader.exec_module(package)
        import elftools.elf.elffile  # noqa: F401 - whether it can be
    except Exception as error:  # noqa: BLE001 - what is not pyelftools may do anything
        sys.modules.pop("elftools", None)
        return str(error) or type(error).__name__
    return ""


class KernelLines:
    """The lines of an image, each looked up once; none any more once its DWARF misleads.

    Raises ElfError if the file cannot be opened.
    """

    def __init__(self, image: Image) -> None:
        from ksym_plugin.kernel.dwarf import ImageLines

        self._lines: ImageLines | None = ImageLines(image)
        self._found: dict[int, Line | None] = {}

    def line(self, address: int, /) -> Line | None:
        """The line of the instruction at an address in the kernel's memory."""
        if address not in self._found:
            self._found[address] = self._find(address)
        return self._found[address]

    def close(self) -> None:
        """Let go of the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _find(self, address: int) -> Line | None:
        if self._lines is None:
            return None
        try:
            return self._lines.line(address)
        except KsymError as error:
            say(f"no more source lines of the kernel: {error}")
            self.close()
            return None


class Session:
    """``past`` and ``clock_map`` are None where nothing is known; then perf's names stand."""

    def __init__(self, is_this_boot: bool) -> None:
        #: Whether the data can be of the running kernel.
        self.is_this_boot = is_this_boot
        self.past: BootHistory | Live | None = None
        self.clock_map: ClockMap | None = None
        #: The source lines of BPF programs.
        self.lines: Lines = _NoLines()
        #: The boot in the history, if there is one.
        self.boot: Boot | None = None
        self._history: BootHistory | None = None

    def adopt(self, path: str, recorded: Recorded) -> None:
        """Take the record of the boot that the data is from."""
        facts = (recorded.build_id, recorded.release, recorded.host, recorded.text_start)
        # Without a header anything would fit; a live pipe is of this boot, if of any.
        is_anonymous = all(fact is None for fact in facts)
        origin = locate.Origin("perf.data", *facts, this_boot_only=is_anonymous)
        opened = self.past = self._history = locate.open_boot(path, say, origin)
        self.clock_map = opened.clock_map()
        self.lines = opened.programs
        self.boot = opened.boot

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


def open_session(explicit: str | None, data_path: str | None, recorded: Recorded) -> Session:
    """What there is; KsymError if a history is there and cannot be used."""
    known = Session(_is_this_boot(recorded))
    path = locate.find(explicit, data_path)
    if path is None:
        known.ask_live()
        return known
    known.adopt(path, recorded)
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


#: A time that nothing covers.
_OUTSIDE = -1
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME = 1 << 63


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
