"""``perf script`` text with its kernel frames repaired, every other byte as it was.

A filter: what is fed in comes out as soon as its line is whole. Most lines of a profile are
frames that stay as they are, each printed many times; so each line is looked at once, and a
sample of known lines passes in one piece.
"""

from __future__ import annotations

import re

from ksym_plugin.kernel.clocks import PERF
from ksym_plugin.perf import namer, text
from ksym_plugin.perf.namer import (
    COARSE,
    Tally,
    format_dso,
    format_name,
    is_bpf_name,
    is_core,
    is_neighbour,
    unnamed_dso,
)
from ksym_plugin.perf.output import below
from ksym_plugin.perf.text import INLINED, UNKNOWN, FrameLine
from ksym_plugin.stacks.names import decode_name, encode_name, strip_nul
from ksym_plugin.timeline.resolver import FIRST_MARKER, Resolver
from ksym_plugin.timeline.symbols import (
    AMONG_BPF,
    EXACT,
    GRACE,
    KERNEL,
    UNKNOWN_ADDRESS,
    Frame,
    Reason,
    Symbol,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Optional, Union

    from ksym_plugin.kernel.clocks import ClockMap
    from ksym_plugin.kernel.kallsyms import Kallsyms
    from ksym_plugin.perf.text import Header
    from ksym_plugin.timeline.resolver import Locator, Lookup

    #: What a frame is called: by what was recorded, or by perf, or it has no name.
    Decision = Union[Frame, str, None]
    #: The running system, asked for once and only if a frame wants it.
    Running = Callable[[], tuple[Optional[Lookup], Optional[Kallsyms]]]

KERNEL_HALF = 1 << 63
_GUEST = b"[guest."
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME = 1 << 63
#: A time that nothing covers.
_OUTSIDE = (-1, -1)
_CONTRADICTED = "the running system was not asked: perf's names in the text are not this kernel's"
_NOT_SHOWN = (
    "the running system was not asked: nothing in the text shows that it is of this boot"
    " (name a history with -H)"
)
#: How many of perf's names of the core image are compared with the running kernel's table, to
#: tell whether the text is of this boot.
_MOST_COMPARED = 64
#: A user frame as perf prints it: most of them, at a glance.
_USER = re.compile(rb"\t *(?:[0-9a-f]{1,15}|[0-7][0-9a-f]{15}) .* \(.*\)", re.DOTALL)
#: Weights of lines. Added up over a sample they count its frames by outcome: perf's name
#: holds at all times, or there is no name at any time. NAMELESS is more than the frames of any
#: sample; SLOW, of lines that have to be decided at their time, is more than any such sum.
STANDS = 1
NAMELESS = 1 << 30
SLOW = 1 << 60


class Renamer:
    """Decides the names of kernel frames, a sample after the other.

    ``lookup`` with its ``clocks`` tells who was where, when; ``clock`` is that of the text, or
    tells that of each event.
    ``follow``, for a history that is being written, waits until it covers a time; it
    returns how far it goes now, and its clocks.
    ``running`` gives the running system's lookup and static table, for frames that still
    have no name; it is used only as long as perf's own names do not contradict it, and
    with ``doubt`` only if one agrees. KsymError if times of ``clock`` cannot be placed.
    """

    def __init__(
        self,
        lookup: Lookup | None = None,
        clocks: ClockMap | None = None,
        clock: str | Mapping[bytes, str] | None = None,
        running: Running | None = None,
        doubt: bool = False,
        follow: Callable[[int], tuple[int, ClockMap]] | None = None,
    ) -> None:
        self.tally = Tally()
        #: Why the running system is not used, if so.
        self.problem = ""
        self._lookup = lookup
        self._clocks = clocks
        self._clock_by_event = None if clock is None or isinstance(clock, str) else clock
        self._clock = clock if isinstance(clock, str) else PERF
        if lookup is not None and clocks is not None:
            for name in set((self._clock_by_event or {b"": self._clock}).values()):
                clocks.to_monotonic(name, 0)
        self._running = running
        self._doubt = doubt
        self._follow = follow
        self._covered = 0
        self._has_modules = lookup is not None and lookup.has_modules
        self._resolver = Resolver(lookup)
        self._compared: dict[int, int] = {}
        self._header: Header | None = None
        self._window: tuple[int, int] | None = _OUTSIDE

    def begin(self, header: Header | None) -> None:
        """A sample begins; None if the time of what follows is not known."""
        self._header = header
        self._window = None

    def decide(self, frame: FrameLine) -> tuple[Decision, str]:
        """What a kernel frame is called, and the dso that is printed of it.

        The dso may be empty. perf's name of a frame has no marks that an earlier run left.
        """
        name, dso = perf_name(frame)
        self._note(frame, name, dso)
        answer = self._answer(frame.address)
        is_wanting = not name or is_bpf_name(name, dso)
        if self._running is not None and is_wanting and isinstance(answer, Reason):
            self._ask_running()
            answer = self._answer(frame.address)
        if answer is COARSE and name:
            self.tally.coarse += 1
            return name, dso
        decision = namer.decide(answer, name, dso, self.tally, self._has_modules)
        if isinstance(decision, Frame):
            return decision, format_dso(decision, dso)
        return decision, dso if decision is not None else unnamed_dso(answer, name, dso)

    def report(self) -> list[str]:
        """The tally as text, and why the running system was not asked."""
        return [*self.tally.lines(), *([self.problem] if self.problem else [])]

    def weight(self, frame: FrameLine) -> int | None:
        """STANDS or NAMELESS if that is so at all times; 0 for no kernel frame, else None.

        perf's name stands for the core image. Nameless is an address of which neither the
        lookup nor the running system knows anything.
        """
        if not is_kernel(frame):
            return 0
        name, dso = perf_name(frame)
        self._note(frame, name, dso)
        if is_bpf_name(name, dso) or (self._follow and not (name and is_core(dso))):
            return None
        if not name and self._running is not None:
            return None
        answer = self._answer(frame.address)
        if not name:
            return NAMELESS if answer is UNKNOWN_ADDRESS else None
        is_fixed = answer is UNKNOWN_ADDRESS
        if answer is AMONG_BPF:
            is_fixed = not is_neighbour(name, dso)
        if isinstance(answer, Frame):
            is_fixed = answer.module is None
        return STANDS if is_fixed else None

    def count(self, weight: int) -> None:
        """Count frames by the sum of their weights."""
        self.tally.confirmed += weight % NAMELESS
        if weight >= NAMELESS:
            unknown = self.tally.unknown
            why = UNKNOWN_ADDRESS.text
            unknown[why] = unknown.get(why, 0) + weight // NAMELESS

    def _answer(self, address: int) -> Frame | Reason:
        """What is known of an address in the sample's window; COARSE if that has two answers."""
        window = self._window
        if window is None:
            window = self._window = self._monotonic_window()
        answer = self._resolver.resolve(address, window[0])
        if window[0] == window[1]:
            return answer
        last = self._resolver.resolve(address, window[1])
        return _common(answer, last)

    # Time

    def _monotonic_window(self) -> tuple[int, int]:
        """The sample's window in CLOCK_MONOTONIC."""
        window = self._header.window() if self._header is not None else None
        if self._header is None or window is None or not 0 < window[0] < _NO_TIME:
            return _OUTSIDE
        if self._clocks is None:
            return window
        clock: str | None = self._clock
        if self._clock_by_event is not None:
            clock = self._clock_by_event.get(self._header.event)
        if clock is None:
            return _OUTSIDE
        earliest = self._clocks.to_monotonic(clock, window[0])
        latest = max(earliest, self._clocks.to_monotonic(clock, window[1]))
        if self._follow is not None and latest > self._covered:
            self._covered, self._clocks = self._follow(latest)
            if latest > self._covered:  # The recorder does not get on: never wait again.
                self._follow = None
        return earliest, latest

    # The running system

    def _note(self, frame: FrameLine, name: str, dso: str) -> None:
        """Note where a function of the core image begins, by perf."""
        is_in_core = name and frame.offset and is_core(dso) and not is_bpf_name(name, dso)
        if self._running is not None and is_in_core and len(self._compared) < _MOST_COMPARED:
            self._compared[frame.address] = int(frame.offset, 16)

    def _ask_running(self) -> None:
        if self._doubt and not self._compared:
            self.problem = _NOT_SHOWN
            return
        ask, self._running = self._running, None
        if ask is None:
            return
        self.problem = ""
        lookup, statics = ask()
        if statics is None:  # There was a message that says why.
            return
        agreeing = _agreeing(self._compared, statics)
        if agreeing < 0 or (self._doubt and not agreeing):
            self.problem = _CONTRADICTED if agreeing < 0 else _NOT_SHOWN
            return
        self._resolver = Resolver(self._lookup or lookup, statics)


def is_kernel(frame: FrameLine) -> bool:
    """Whether a line is a frame of this kernel, and no function inlined into one."""
    if frame.dso is not None and (frame.dso == INLINED or frame.dso.startswith(_GUEST)):
        return False
    return len(frame.digits) == 16 and KERNEL_HALF <= frame.address < FIRST_MARKER


def perf_name(frame: FrameLine) -> tuple[str, str]:
    """perf's name and dso of a frame, each empty where it has none."""
    dso = "" if frame.dso in (None, UNKNOWN) else decode_name(frame.dso or b"")
    if frame.name == UNKNOWN:
        return "", strip_nul(dso)
    name, dso = strip_nul(decode_name(frame.name)), strip_nul(dso)
    # A mark that an earlier run left.
    return (name.rstrip("?") if is_bpf_name(name.rstrip("?"), dso) else name), dso


def _common(first: Frame | Reason, last: Frame | Reason) -> Frame | Reason:
    """The answer that holds from the first to the last instant of a window."""
    if isinstance(first, Frame) and isinstance(last, Frame):
        # Who was there at both ends was there in between; one of the same name need not be.
        is_one = first.lifetime is last.lifetime
        if is_one and first.name == last.name and first.offset == last.offset:
            return max(first, last, key=_doubtful)
        return COARSE
    return first if first is last else COARSE


def _doubtful(frame: Frame) -> int:
    return (EXACT, GRACE).index(frame.certainty) if frame.certainty in (EXACT, GRACE) else 2


def _agreeing(offsets: dict[int, int], statics: Kallsyms) -> int:
    """For how many more of perf's names than not a table has the same start of the function.

    ``offsets`` are those of addresses in their functions, by perf.
    """
    agreeing = 0
    for address, offset in offsets.items():
        found = statics.find(address)
        agrees = isinstance(found, Symbol) and found.start == address - offset
        agreeing += 1 if agrees else -1
    return agreeing


def rewritten(line: bytes, frame: FrameLine, decision: Decision, dso: str) -> bytes:
    """The line of a kernel frame with what ``Renamer.decide`` says of it."""
    name, perf_dso = perf_name(frame)
    if decision == name or (decision is None and not name and dso == perf_dso):
        return line
    if isinstance(decision, Frame):
        offset = f"+{decision.offset:#x}" if frame.offset or not name else ""
        symbol = format_name(decision) + offset
    elif decision is None:
        symbol = "[unknown]"
    else:
        symbol = decision + frame.offset.decode("ascii")
    parts = [line[: frame.name_at], encode_name(symbol)]
    if frame.dso is not None:
        parts += [b" (", encode_name(dso or "[unknown]"), b")"]
    return b"".join((*parts, line[frame.end :]))


def located(
    locator: Locator, frame: FrameLine, decision: Decision, dso: str, is_leaf: bool
) -> Frame | None:
    """A kernel frame with its source location, or what it traces; None if neither is known."""
    if isinstance(decision, Frame):
        return locator.locate(decision, is_leaf)
    if decision is None or not is_core(dso):
        return None
    offset = int(frame.offset, 16) if frame.offset else None
    location = locator.in_image(frame.address, offset, is_leaf)
    if location is None:
        return None
    return Frame(frame.address, decision, offset or 0, None, KERNEL, EXACT, None, location)


class Weights(dict[bytes, int]):
    """The weights of lines within a sample (``Renamer.weight``), each found once."""

    def __init__(self, renamer: Renamer) -> None:
        super().__init__()
        self._renamer = renamer

    def __missing__(self, line: bytes) -> int:
        if not line:
            return 0
        weight: int | None = 0
        if not _USER.fullmatch(line):
            frame = text.parse(line, False)
            if isinstance(frame, text.FrameLine):
                weight = self._renamer.weight(frame)
            elif frame is not None or not text.is_source(line):
                return SLOW
        if weight is None:
            return SLOW
        text.keep(self, line, weight)
        return weight


class Annotator(text.TextReader):
    """Text in, text out. ``feed`` takes any piece of it, ``close`` gives its end.

    With a ``locator`` a kernel frame's source location stands on a line below it.
    """

    def __init__(self, renamer: Renamer, locator: Locator | None = None) -> None:
        super().__init__()
        self._renamer = renamer
        self._locator = locator
        self._tally = renamer.tally
        self._weights = Weights(renamer)
        self._has_frames = True

    def feed(self, data: bytes) -> bytes:
        """The text of all lines that have ended."""
        before, whole, after = self._cutter.cut(data)
        if after:
            self._tally.unparsed += 1
        return before + (self._lines(whole) if whole else b"") + after

    def close(self) -> bytes:
        """The rest: a last line without its end."""
        rest = self._cutter.rest()
        return self._line(rest) if rest else b""

    def _lines(self, whole: bytes) -> bytes:
        """Lines that have all ended."""
        pieces = whole[:-1].split(b"\n\n")
        for at, piece in enumerate(pieces):
            if at:
                self._blank()
            passed = self._sample(piece) if self._is_start else None
            if passed is None:
                passed = b"\n".join(map(self._line, piece.split(b"\n")))
            pieces[at] = passed
        pieces[-1] += b"\n"
        return b"\n\n".join(pieces)

    def _sample(self, piece: bytes) -> bytes | None:
        """A header with the frames below it; None if this is anything else."""
        lines = self._begin_whole(piece) if self._locator is None else None
        if not lines:
            return None if lines is None else piece
        weights = list(map(self._weights.__getitem__, lines))
        weight = sum(weights)
        if weight >= SLOW:
            first = piece.partition(b"\n")[0]
            return b"\n".join((first, *map(self._weighed, lines, weights)))
        self._renamer.count(weight)
        self._has_frames = bool(lines[0])
        if not lines[-1]:
            self._blank()
        return piece

    def _weighed(self, line: bytes, weight: int) -> bytes:
        """A line with its weight: it is passed on, or decided at its time."""
        if weight >= SLOW or not line or self._is_start:
            return self._line(line)
        self._has_frames = True
        self._renamer.count(weight)
        return line

    def _begin(self, header: text.Header) -> None:
        self._renamer.begin(header)
        self._has_frames = False
        self._is_start = False

    def _blank(self) -> None:
        self._is_start = True
        if self._has_frames:
            self._renamer.begin(None)

    def _frame(self, line: bytes, frame: text.FrameLine) -> bytes:
        is_leaf = not self._has_frames
        self._has_frames = True
        self._is_start = False
        if not is_kernel(frame):
            return line
        decision, dso = self._renamer.decide(frame)
        line = rewritten(line, frame, decision, dso)
        if self._locator is None:
            return line
        known = located(self._locator, frame, decision, dso, is_leaf)
        source = b"" if known is None else encode_name(below(known).rstrip("\n"))
        return line + b"\n" + source if source else line

    def _other(self, line: bytes) -> bytes:
        self._tally.unparsed += text.is_junk(line)
        if self._is_start:  # Whatever follows, the sample before has ended.
            self._renamer.begin(None)
        return line
