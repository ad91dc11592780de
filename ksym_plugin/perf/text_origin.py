"""Where ``perf script`` text is from: its kernel, its boot, and the clock of its times.

``perf script --header`` tells. Without that header the text is compared with the history: perf
has named the programs that it knew, and on the wrong clock others were at their addresses
then. A program that was there for a short time tells much, one that was there all the time
tells nothing. Where that leaves open which program a frame is in, there is no name.
"""

from __future__ import annotations

import contextlib
import re
import select
import time
from functools import partial

from ksym_plugin.history import locate
from ksym_plugin.history.locate import Origin
from ksym_plugin.kernel.clocks import BOOTTIME, CLOCKS, MONOTONIC, PERF, REALTIME
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.perf.namer import COARSE, OUT_OF_LINE, is_bpf_name, is_core, resolve_within
from ksym_plugin.perf.output import say
from ksym_plugin.perf.repaint import PASSES, Leeway, Renamer, StackReader, perf_name, region
from ksym_plugin.perf.session import clocks_now, open_history
from ksym_plugin.perf.text import BOM
from ksym_plugin.stacks.names import decode_name
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import (
    EXACT,
    GRACE,
    NOT_LOADED,
    OUTSIDE_HISTORY,
    VACANT,
    Frame,
    Reason,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO, Union

    from ksym_plugin.history.locate import Choice
    from ksym_plugin.history.reader import BootHistory
    from ksym_plugin.kernel.clocks import ClockMap
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.session import Session
    from ksym_plugin.perf.text import FrameLine, Header
    from ksym_plugin.timeline.resolver import Lookup

    #: The clock of all times, or of each event's.
    Clock = Union[str, Mapping[bytes, str]]
    Window = tuple[int, int]
    #: When and where a frame was, and perf's name of it, if it has one.
    Seen = tuple[Window, int, str]

_SIZE = 1 << 20
#: A function is no longer than this.
_FUNCTION = 1 << 20
_OF_ANOTHER_BOOT = "the running system was not asked: the text is not of this boot"
#: What ``perf script --header`` prints before everything else.
_HOST = re.compile(rb"^# hostname : (\S+)", re.MULTILINE)
_RELEASE = re.compile(rb"^# os release : (\S+)", re.MULTILINE)
_EVENT = re.compile(
    rb"^# event : name = (.*?), (?:, )?(?:id|type|size) = "
    rb"(?:.*use_clockid = 1.*clockid = (-?\d+))?",
    re.MULTILINE,
)
#: It begins and ends with this.
_RULER = b"# ========"
_CLOCKS = {b"": PERF, b"0": REALTIME, b"1": MONOTONIC, b"7": BOOTTIME}
#: How much of a text is looked at before its first frame is named: bytes, seconds that an
#: endless one is waited for, and BPF frames.
_MOST = 1 << 21
_PATIENCE = 3.0
_MOST_FRAMES = 4_000
#: A clock that no history knows, such as CLOCK_MONOTONIC_RAW, may differ from one that it knows by
#: this, in ns: names that nothing else supports hold for so long before and after.
UNTOLD = 10_000_000_000
#: Of so many frames that perf named one may contradict the clock: perf errs too.
_RELIABLE = 100
#: A clock is refuted by so many more programs than another.
_REFUTED = 3
#: If more than one in so many frames may be in two programs, nothing has decided.
_UNDECIDED = 4
#: Answers that a program was there, and that none was.
_CERTAIN = (EXACT, GRACE)
_ABSENT = (NOT_LOADED, VACANT, OUTSIDE_HISTORY)


class Text:
    """perf script's text, and what it tells of itself; its first part is read at once.

    Without a header ``host`` and ``release`` are None. ``clock`` is None where nothing tells
    it, and has nothing of events on a clock of which a history keeps no times. KsymError if it
    is a perf.data. ``start`` was read of the stream before.
    """

    def __init__(self, stream: IO[bytes], start: bytes = b"") -> None:
        self._stream = stream
        self._first = start
        self._is_whole = False
        while not self._first or (_is_header(self._first) and len(self._first) < _SIZE):
            if not self._read_on():
                break
        if self._first.startswith(MAGIC):
            raise KsymError(
                "this is what perf recorded, not the text that perf script prints of it",
                "use ksym script -i FILE, or: perf script -i FILE | ksym ...",
            )
        self.host = _found(_HOST, self._first)
        self.release = _found(_RELEASE, self._first)
        told = {name: _CLOCKS.get(number) for name, number in _EVENT.findall(self._first)}
        self.clock = _clock_of(told)
        #: The events of a header whose clocks a history cannot place.
        self.unplaced = [name for name, clock in told.items() if clock is None]

    def pieces(self) -> Iterator[bytes]:
        """The whole text, each piece as soon as there is one."""
        piece = self._first
        while piece:
            yield piece
            piece = b"" if self._is_whole else self._read()

    def start(self, is_timed: bool) -> Start:
        """What the beginning shows. With ``is_timed`` the clock is known: one sample is enough."""
        start, done = Start(), 0
        give_up = time.monotonic() + _PATIENCE
        most = _SIZE // 16 if is_timed else _MOST
        while done < most and not start.is_enough(is_timed):
            if done == len(self._first) and not (self._waits(give_up) and self._read_on()):
                break
            piece = self._first[done : done + _SIZE // 16]
            start.read(piece)
            done += len(piece)
        if self._is_whole and done == len(self._first):
            start.end()
        return start

    def origin(self, clock: Clock | None, start: Start) -> Origin:
        """What is known of the boot that it is from."""
        known = {clock} if isinstance(clock, str) else set((clock or {}).values()) or set(CLOCKS)
        times = {} if start.times is None else dict.fromkeys(known, start.times)
        core = tuple(start.functions) or None
        return Origin("text", release=self.release, host=self.host, core=core, times=times)

    def _read_on(self) -> bool:
        """Read some more of the first part; whether there was any."""
        piece = self._read()
        self._first += piece
        self._is_whole = not piece
        return bool(piece)

    def _waits(self, until: float) -> bool:
        """Wait for more of an endless text; whether there is some, or its end."""
        try:
            readable, _, _ = select.select([self._stream], [], [], max(0, until - time.monotonic()))
        except (OSError, ValueError):  # It is no file: what is there can be read.
            return not self._is_whole
        return bool(readable) and not self._is_whole

    def _read(self) -> bytes:
        # Whatever is there, however little: a program that pipes into this may pause. click
        # opens buffered files, but its type has no read1().
        piece: bytes = self._stream.read1(_SIZE)  # type: ignore[attr-defined]
        return piece


def _is_header(text: bytes) -> bool:
    """Whether all of a text so far is header, with more of it to come."""
    lines = text[len(BOM) if text.startswith(BOM) else 0 :].splitlines()
    are_comments = bool(lines) and all(line.startswith(b"#") for line in lines)
    return are_comments and lines.count(_RULER) < 2


def _found(pattern: re.Pattern[bytes], text: bytes) -> str | None:
    found = pattern.search(text)
    return None if found is None else found[1].decode("utf-8", "surrogateescape")


def _clock_of(told: Mapping[bytes, str | None]) -> Clock | None:
    """The clock that a header tells, of each event if they differ; None without a header."""
    clocks = {name: clock for name, clock in told.items() if clock is not None}
    if len(set(told.values())) == 1 and clocks:
        return clocks.popitem()[1]
    return clocks if told else None


class Start(StackReader):
    """What the beginning of a text shows: when it is of, and what perf named."""

    def __init__(self) -> None:
        super().__init__(Renamer())
        #: The first and the last time of a sample, ns.
        self.times: Window | None = None
        #: Where functions of the kernel's image were, by perf.
        self.functions: set[int] = set()
        #: The frames that may be BPF's.
        self.frames: list[Seen] = []

    def is_enough(self, is_timed: bool) -> bool:
        return self.times is not None if is_timed else len(self.frames) >= _MOST_FRAMES

    def _user(self, line: bytes, frame: FrameLine) -> None:
        return None

    def _kernel(
        self, line: bytes, frame: FrameLine, decision: Decision, dso: str, is_leaf: bool
    ) -> tuple[int, str] | None:
        """The frame if it may be BPF's."""
        name, dso = perf_name(frame)
        if region(frame) != PASSES or (name and not is_bpf_name(name, dso)):
            # perf gives the last symbol of a map all that follows it (kallsyms has no lengths).
            is_within = frame.distance is not None and frame.distance < _FUNCTION
            if name and name not in OUT_OF_LINE and is_core(dso) and is_within:
                self.functions.add(frame.address)
            return None
        return frame.address, name

    def _join(self, pieces: list[tuple[int, str] | None]) -> list[tuple[int, str]]:
        return [piece for piece in pieces if piece is not None]

    def _sample(self, header: Header, stack: list[tuple[int, str]], line: bytes) -> None:
        window = header.window(line)
        if window is not None:
            first, last = self.times or window
            self.times = min(first, window[0]), max(last, window[1])
            self.frames += [(window, address, name) for address, name in stack]


class _Fit:
    """How well a clock fits what perf named.

    If it is not the right one, the right one differs from it by ``low`` to ``high`` ns: on
    that clock each program was there when perf saw it.
    """

    def __init__(self, clock: str, clock_map: ClockMap, resolver: Resolver) -> None:
        self.clock = clock
        #: From when to when times of this clock can have been, CLOCK_MONOTONIC ns.
        self.place = partial(clock_map.window, clock)
        self._resolver = resolver
        self.low, self.high = -UNTOLD, UNTOLD
        self.agreeing = 0
        #: Frames where another program was, or none, and perf's names of them.
        self.contradicting = 0
        self.against: set[str] = set()

    def compare(self, seen: Seen) -> None:
        """Take in a frame that perf named."""
        name = seen[2]
        first, last = self.place(*seen[0])
        answer = self.answer(seen)
        lifetime = answer.lifetime if isinstance(answer, Frame) else None
        if isinstance(answer, Frame) and lifetime is not None and answer.name == name:
            self.agreeing += 1
            self.low = max(self.low, min(0, lifetime.loaded_earliest - last))
            if lifetime.unloaded_latest is not None and answer.certainty == EXACT:
                self.high = min(self.high, max(0, lifetime.unloaded_latest - first))
        elif answer in _ABSENT or (isinstance(answer, Frame) and answer.certainty in _CERTAIN):
            self.contradicting += 1
            self.against.add(name)

    def answer(self, seen: Seen, leeway: Leeway | None = None) -> Frame | Reason:
        """Who was where a frame is; COARSE where there were several within the leeway."""
        window, address, _ = seen
        placed = self.place(*window)
        return resolve_within(
            self._resolver, address, placed if leeway is None else leeway.widen(*placed)
        )


def find_clock(start: Start, history: BootHistory, clock_map: ClockMap) -> tuple[str, Leeway]:
    """The clock that fits what perf named, and how far the right one may be from it.

    KsymError if that leaves open which programs the frames are in.
    """
    times, resolver = start.times or (0, 0), Resolver(history)
    fits = [_Fit(clock, clock_map, resolver) for clock in CLOCKS if clock_map.knows(clock)]
    fits = [fit for fit in fits if history.overlaps(*fit.place(*times))]
    if not fits:
        return MONOTONIC, Leeway()  # Nothing is known of those times on any clock.
    widest = _leeway_of(fits, fits[0], times[0], history)
    # What was there on every clock tells nothing of the clock.
    passing = [seen for seen in start.frames if fits[0].answer(seen, widest) is COARSE]
    for fit in fits:
        for seen in passing:
            if seen[2]:
                fit.compare(seen)
    best = min(fits, key=lambda fit: (len(fit.against), fit.contradicting))
    left = [fit for fit in fits if len(fit.against) < len(best.against) + _REFUTED]
    leeway = _leeway_of(left, best, times[0], history)
    answers = [best.answer(seen, leeway) for seen in start.frames]
    found = [answer for answer in answers if answer is COARSE or isinstance(answer, Frame)]
    # Most of the frames that may be BPF's have to be in one program.
    is_open = found.count(COARSE) * _UNDECIDED > len(found)
    if best.contradicting * _RELIABLE > best.agreeing or is_open:
        raise KsymError(
            "nothing tells which clock the text's times are on, and the names of BPF frames"
            " depend on it",
            f"print it with perf script --header, or give the clock: --clock {'|'.join(CLOCKS)}",
        )
    return best.clock, leeway


def _leeway_of(fits: list[_Fit], best: _Fit, at: int, history: BootHistory) -> Leeway:
    """How far the right clock may be from ``best``, if it is, or nearly is, one of ``fits``.

    Clocks are compared at one time.
    """
    lows, highs = [], []
    first, last = best.place(at, at)
    for fit in fits:
        since, until = fit.place(at, at)
        lows.append(since - last + fit.low)
        highs.append(until - first + fit.high)
    return Leeway(min(lows), max(highs), *history.bounds)


@contextlib.contextmanager
def open_text(
    text: Text, history: Choice, clock: str | None, tell: Callable[[str], None] = say
) -> Iterator[tuple[Session, Renamer]]:
    """The session of a text, and what names its frames; without a history, by the running system.

    ``clock`` is that of the text if the user says so. KsymError if the history is of no use,
    or the clock is neither told nor found.
    """
    told = clock or text.clock
    start = text.start(told is not None)
    leeway = None if told is not None else Leeway(-UNTOLD, UNTOLD)
    with open_history(history, None, text.origin(told, start), tell) as known:
        if known.history is None:
            yield known, _by_running_system(known, told, leeway)
            return
        if told == {}:
            raise KsymError(
                "the text's times are on a clock that a history cannot place",
                "record with: perf record -k CLOCK_MONOTONIC",
            )
        if known.clock_map is not None and told is None:
            told, leeway = find_clock(start, known.history, known.clock_map)
        for event in () if clock else text.unplaced:
            tell(
                f"samples of {decode_name(event)} are on a clock that a history cannot place:"
                " their BPF frames stay as perf has them"
            )
        yield known, known.renamer(told, leeway=leeway)


def _by_running_system(known: Session, told: Clock | None, leeway: Leeway | None) -> Renamer:
    """What names frames if perf's names show that the text is of this boot."""
    if not known.is_this_boot:
        renamer = Renamer()
        renamer.namer.problem = _OF_ANOTHER_BOOT
        return renamer

    def running() -> tuple[Lookup | None, Kallsyms | None]:
        known.ask_live()
        return known.lookup, known.kallsyms()

    now = clocks_now()
    clocks = now if now.knows(PERF) else None
    return Renamer(None, clocks, told, running, doubt=True, leeway=leeway)


@contextlib.contextmanager
def open_renamer(
    text: Text, history: Choice, clock: str | None, tell: Callable[[str], None] = say
) -> Iterator[Renamer | None]:
    """The same; None without a history."""
    if locate.find(history, None) is None:
        yield None
        return
    with open_text(text, history, clock, tell) as (_, renamer):
        yield renamer
