"""What samples are named by: their boot, their clock, and what was loaded where and when.

Every command opens one ``Session``. It holds a history's record of one boot, or what the
running system tells, or nothing.
"""

from __future__ import annotations

import contextlib
import time

from ksym_plugin.history import locate
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import PERF, ClockMap, PerfClock, clock_of_attr
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf.output import say
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import OUTSIDE_HISTORY, UNKNOWN_ADDRESS
from ksym_plugin.timeline.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ksym_plugin.history.reader import Boot, BootHistory
    from ksym_plugin.kernel.vmlinux import Image
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.namer import Running
    from ksym_plugin.perf.repaint import Leeway, Renamer
    from ksym_plugin.timeline.resolver import Lines
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation
    from ksym_plugin.timeline.timeline import Answer


def open_kernel(path: str, recorded: Recorded, session: Session) -> Image | None:
    """The image of the kernel that a perf.data is of; None, and a message, without pyelftools.

    ElfError if the file is of another kernel, or where that kernel lay is not known.
    """
    try:
        import elftools.elf.elffile  # noqa: F401 - whether it can be
    except Exception as error:  # noqa: BLE001 - what is not pyelftools may do anything
        say(
            f"{path} is not read, as pyelftools cannot be used ({error});"
            " run ksym script, or install it for this Python (Debian: python3-pyelftools)"
        )
        return None
    from ksym_plugin.kernel.vmlinux import open_image

    kernels: list[Recorded | Boot] = [recorded]
    if session.history is not None:
        kernels.append(session.history.boot)
    if session.is_this_boot:
        kernels.append(locate.running_boot())
    build_id = next((known.build_id for known in kernels if known.build_id), None)
    text_start = next((known.text_start for known in kernels if known.text_start), None)
    return open_image(path, text_start, build_id, session.kallsyms(), say)


class Session:
    """What was loaded where and when in one boot; ``close`` it.

    ``lookup`` and ``clock_map`` are None where nothing is known: then perf's names stand.
    ``history`` is the record that they are of, None without one. ``is_this_boot`` says that
    the running kernel's tables are of that boot too.
    """

    def __init__(self, history: BootHistory | None, is_this_boot: bool) -> None:
        self.history = history
        self.is_this_boot = is_this_boot
        self.lookup: BootHistory | Live | None = history
        self.clock_map = None if history is None else history.clock_map()
        #: The source lines of BPF programs.
        self.lines: Lines = _NoLines() if history is None else history.programs

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the history."""
        if self.history is not None:
            self.history.close()

    def kallsyms(self) -> Kallsyms | None:
        """The running kernel's own table if the samples are of it; None, and a message, if it
        cannot be read or hides its addresses."""
        try:
            return Kallsyms.load_shown() if self.is_this_boot else None
        except KsymError as error:
            say(f"the running kernel was not asked for names: {error}")
            return None

    def time(self, at: int | None, clock: str | None) -> int:
        """A time on a clock, in CLOCK_MONOTONIC ns; without one, the end of what is covered."""
        if at is not None and self.clock_map is not None:
            return self.clock_map.to_monotonic(clock or PERF, at)
        return 0 if self.history is None else _covered(self.history, time.monotonic_ns())

    def renamer(
        self,
        clock: str | Mapping[bytes, str] | None,
        image: Image | None = None,
        leeway: Leeway | None = None,
    ) -> Renamer:
        """What names frames of text by this, and by the running kernel's table if it is its.

        ``clock`` is that of the times, or tells that of each event. The ``image`` of the kernel
        stands in front of its table. KsymError if times cannot be placed.
        """
        from ksym_plugin.perf.repaint import Renamer

        running = self.running(image)
        return Renamer(
            self.lookup, self.clock_map, clock, running, follow=self.follower(), leeway=leeway
        )

    def running(self, image: Image | None) -> Running | None:
        """The running kernel's table, where samples are of it, as a ``Namer`` asks for it.

        The ``image`` of the kernel stands in front of its table.
        """
        if image is not None:
            return lambda: (None, image)
        return (lambda: (None, self.kallsyms())) if self.is_this_boot else None

    def follower(self) -> Callable[[int], tuple[int, ClockMap]] | None:
        """For a history that is being written: waits until it covers a time."""
        history = self.history
        if history is None or not any(run.writing for run in history.sessions):
            return None

        def follow(until: int) -> tuple[int, ClockMap]:
            return _covered(history, until), history.clock_map()

        return follow

    def ask_live(self) -> None:
        """Without a history: ask the running system what is loaded now, and since when."""
        if not self.is_this_boot:
            say("no history, and the data is of another boot: BPF frames stay as perf has them")
            return
        from ksym_plugin.kernel import snapshot
        from ksym_plugin.kernel.bpf_prog import LiveLines

        try:
            loads = snapshot.take().loads
        except KsymError as error:
            say(f"no history, and the live system does not tell: {error}")
            return
        say("no history: only BPF programs that are still loaded can be named")
        timeline = Timeline()
        timeline.nodes = identity.possible_nodes()
        for load in loads:
            timeline.apply(load)
        self.clock_map = clocks_now()
        self.lookup = Live(timeline)
        self.lines = LiveLines()


def open_history(
    history: locate.Choice,
    data_path: str | None = None,
    origin: locate.Origin | None = None,
    tell: Callable[[str], None] = say,
) -> Session:
    """The session of the boot in a history that data of ``origin`` is from.

    Without a history it is empty, and ``is_this_boot`` says whether the data can be of the
    running system. ``tell`` is given what a user must know of all that. HistoryError if
    there is a history that is of no use.
    """
    path = locate.find(history, data_path)
    if path is None:
        return Session(None, origin is not None and is_of_now(origin, tell))
    recorded = locate.open_boot(path, tell, origin, history.boot)
    try:
        return Session(recorded, recorded.boot.boot_id == identity.boot_id())
    except BaseException:
        recorded.close()
        raise


def open_session(
    history: locate.Choice, data_path: str | None, recorded: Recorded, clock: str | None = None
) -> Session:
    """The session of a perf.data; KsymError if a history is there and cannot be used.

    ``clock`` is that of the samples where the user says so, else each event's attr tells.
    Of a kernel whose addresses nothing here tells from a user's it is empty.
    """
    if recorded.other_split:
        say(f"all frames stay as perf has them: {recorded.other_split}")
        return Session(None, False)
    facts = (recorded.build_id, recorded.release, recorded.host, recorded.text_start)
    clocks = {clock or clock_of_attr(attr) for attr in recorded.attrs.values()}
    only = clocks.pop() if len(clocks) == 1 else None
    first, last = recorded.first_time, recorded.last_time
    origin = locate.Origin(
        "perf.data",
        build_id=recorded.build_id,
        release=recorded.release,
        host=recorded.host,
        text_start=recorded.text_start,
        times=None if first is None or only is None else {only: (first, last or first)},
        # Without a header every boot would fit; a live pipe can be of this one alone.
        this_boot_only=all(fact is None for fact in facts),
    )
    session = open_history(history, data_path, origin)
    if session.history is None:
        session.ask_live()
    return session


def is_of_now(origin: locate.Origin, tell: Callable[[str], None]) -> bool:
    """Whether data can be of the running system."""
    boot = locate.running_boot()
    if not origin.fits(boot) or not origin.can_be_of_now(clocks_now()):
        return False
    for sentence in origin.other_host(boot):
        tell(sentence)
    return True


def clocks_now() -> ClockMap:
    """The clocks of this system as they are now."""
    with contextlib.closing(PerfClock()) as clock:
        return ClockMap([clock.read()])


def _covered(history: BootHistory, until: int) -> int:
    """Up to when a history tells; one that is being written is waited for."""
    history.wait_covered(until)
    return max((run.covered for run in history.sessions), default=0)


class _NoLines:
    """The source lines where nothing was recorded: there are none."""

    __slots__ = ()

    def line(self, _lifetime: Lifetime, _offset: int, /) -> SourceLocation | None:
        return None

    def traced(self, _lifetime: Lifetime, /) -> str | None:
        return None

    program_name = traced


class Live:
    """What is loaded now, and since when; nothing is known of what was there before.

    Without a ``timeline`` nothing is known at all.
    """

    __slots__ = ("_timeline",)
    has_modules = False

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._timeline = timeline

    @property
    def extent(self) -> int:
        return 0 if self._timeline is None else self._timeline.extent

    def at(self, address: int, time_ns: int, /) -> Answer:
        answer = (None, None) if self._timeline is None else self._timeline.at(address, time_ns)
        if answer[0] is None and answer[1] is not UNKNOWN_ADDRESS:
            return None, OUTSIDE_HISTORY
        return answer
