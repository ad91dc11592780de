"""``perf script`` text with its kernel frames repaired, every other byte as it was.

A filter: what is fed in comes out as soon as its line is whole. Most lines of a profile are
frames that stay as they are, each printed many times; so each line is looked at once, and a
sample of known lines passes in one piece.
"""

from __future__ import annotations

from functools import lru_cache, partial

from ksym_plugin.kernel.clocks import PERF
from ksym_plugin.perf import text
from ksym_plugin.perf.namer import Namer, format_name, is_bpf_name, is_core, located
from ksym_plugin.perf.output import below
from ksym_plugin.perf.text import INLINED, UNKNOWN, Cutter, FrameLine
from ksym_plugin.stacks.names import decode_name, encode_name, strip_nul
from ksym_plugin.timeline.resolver import FIRST_MARKER
from ksym_plugin.timeline.symbols import UNKNOWN_ADDRESS, Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ksym_plugin.kernel.clocks import ClockMap
    from ksym_plugin.perf.namer import Decision, Running
    from ksym_plugin.perf.text import Header
    from ksym_plugin.timeline.resolver import Locator, Lookup

    #: What a reader makes of a frame, and of a whole stack.
    Piece = Any
    Whole = Any
    #: A line, or a name as bytes or text.
    Name = Any

_KERNEL_HALF = 1 << 63
#: Frames in perf's columns are lower if their addresses are.
_UPPER_HALF = b"\t8"
_DIGITS = b"0123456789abcdef"
_GUEST = b"[guest."
_VSYSCALL = b"[vsyscall]"
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME = 1 << 63
#: A time that nothing covers.
_OUTSIDE = (-1, -1)
_ALWAYS = 1 << 64
#: Blank lines, which end a sample; a line of blanks is none.
_BLANK = (b"", b"\r")
#: Bounds of what is kept: lines, the longest of them, and bytes of whole stacks.
_MOST_LINES = 1 << 16
_LONGEST_KEPT = 1 << 10
_MOST_BYTES = 1 << 25
#: What is kept of a stack beside its text, in bytes.
_STACK_SIZE = 1 << 8
#: How many names, as perf printed them, are kept as text.
_MOST_NAMES = 1 << 12
#: What a line is within the kernel's part of a stack. The user's part begins with USER. BESIDE
#: stays as it is: a frame of another kernel, an inlined function, a source line. Of a kernel
#: frame perf's name holds at all times (STANDS), or no name does (NAMELESS), or that PASSES.
USER, BESIDE, STANDS, NAMELESS, PASSES = range(5)


class Leeway:
    """By how much the times of a text may be off, as its clock is not known for sure.

    They are ``low`` to ``high`` ns later than they are placed, but no earlier than ``since`` and
    no later than ``until``.
    """

    __slots__ = ("_high", "_low", "_since", "until")

    def __init__(self, low: int = 0, high: int = 0, since: int = 0, until: int = 1 << 63) -> None:
        self._low = low
        self._high = high
        self._since = since
        self.until = until

    def widen(self, first: int, last: int) -> tuple[int, int]:
        return (
            min(first, max(first + self._low, self._since)),
            max(last, min(last + self._high, self.until)),
        )


class Renamer:
    """Decides the names of kernel frames of text, a sample after the other.

    ``lookup`` with its ``clocks`` tells who was where, when; ``clock`` is that of the text, or
    tells that of each event. ``running`` and ``doubt`` are a Namer's.
    ``leeway`` is for a clock that is not known for sure.
    ``follow``, for a history that is being written, waits until it covers a time; it
    returns how far it goes now, and its clocks. KsymError if times of ``clock`` cannot be placed.
    """

    def __init__(
        self,
        lookup: Lookup | None = None,
        clocks: ClockMap | None = None,
        clock: str | Mapping[bytes, str] | None = None,
        running: Running | None = None,
        doubt: bool = False,
        follow: Callable[[int], tuple[int, ClockMap]] | None = None,
        leeway: Leeway | None = None,
    ) -> None:
        self.namer = Namer(lookup, running, doubt)
        self.tally = self.namer.tally
        #: Whether anything but perf can have names.
        self.knows = lookup is not None or running is not None
        self._clocks = clocks
        #: That of all events, or of each.
        self._clock = PERF if clock is None else clock
        if lookup is not None and clocks is not None:
            names = [self._clock] if isinstance(self._clock, str) else self._clock.values()
            for name in names or [PERF]:
                clocks.window(name, 0, 0)
        self._follow = follow
        self._leeway = leeway
        self._covered = 0
        self._header: Header | None = None
        self._line = b""
        self._window: tuple[int, int] | None = _OUTSIDE
        self._time: tuple[int, int] | None = None
        #: Samples whose time was wanted, and is not printed.
        self._untimed = 0

    def report(self) -> list[str]:
        """The tally as text, and what kept frames from being named."""
        lines = self.namer.report()
        if self._untimed:
            lines.append(
                f"{self._untimed:,} samples have no time, by which BPF frames are named"
                " (print it with: perf script -F +time)"
            )
        return lines

    def begin(self, header: Header | None, line: bytes = b"") -> None:
        """A sample begins, with this line; None if the time of what follows is not known."""
        self._header = header
        self._line = line
        self._window = None
        self._time = None

    def _shown(self) -> tuple[int, int] | None:
        """First and last ns that the sample's time can stand for, on its own clock."""
        if self._time is None and self._header is not None:
            self._time = self._header.window(self._line)
        return self._time

    def is_within(self, since: int, until: int) -> bool:
        """Whether the sample's clock showed a time from ``since`` to ``until`` (ns)."""
        shown = self._shown()
        return shown is not None and since <= shown[0] and shown[1] <= until

    def decide_all(self, frames: list[FrameLine]) -> tuple[list[tuple[Decision, str]], int, int]:
        """What frames of one sample are called, as ``decide`` has it.

        And from when to when, as the sample's clock shows it (ns), that surely holds for the
        samples that follow: never, if the second is less than the first.
        """
        decided = [self.decide(frame) for frame in frames]
        window, shown = self._window, self._time
        is_alive = self._follow is not None or self._leeway is not None
        if is_alive or window is None or shown is None or not isinstance(self._clock, str):
            return decided, 0, -1
        kept = self.namer.kept_until
        until = min(kept(at.address, *perf_name(at), window[0]) for at in frames)
        if until < window[1]:
            return decided, 0, -1
        if self._clocks is not None:
            until = self._clocks.last_before(self._clock, until, shown[1])
        return decided, shown[0], until

    def decide(self, frame: FrameLine) -> tuple[Decision, str]:
        """What a kernel frame is called, and the dso that is printed of it, which may be empty.

        perf's name of a frame has no marks that an earlier run left.
        """
        return self.namer.decide(*self._said(frame))

    def is_fixed(self, frame: FrameLine) -> bool:
        """Whether perf's name of a kernel frame, or that it has none, holds at all times."""
        name, dso = perf_name(frame)
        if self._follow is not None and not (name and is_core(dso)):
            return False
        if not self.knows:
            return not is_bpf_name(name, dso)  # Which nothing vouches for.
        return self.namer.is_fixed(*self._said(frame))

    def count(self, standing: int, nameless: int) -> None:
        """Count frames that are the same at all times: named, and nameless."""
        self.tally.confirmed += standing
        if nameless:
            unknown = self.tally.unknown
            why = UNKNOWN_ADDRESS.text
            unknown[why] = unknown.get(why, 0) + nameless

    def _said(self, frame: FrameLine) -> tuple[int, tuple[int, int], str, str, int | None]:
        """A frame's address, the window of its sample, and what perf says of it."""
        if self._window is None:
            self._window = self._monotonic_window()
        return (frame.address, self._window, *perf_name(frame), frame.distance)

    def _monotonic_window(self) -> tuple[int, int]:
        """The sample's window in CLOCK_MONOTONIC."""
        header = self._header
        window = self._shown()
        if header is not None and not header.digits:
            self._untimed += 1
        if header is None or window is None or not 0 < window[0] < _NO_TIME:
            return _OUTSIDE
        if self._clocks is None:
            return window
        clock = self._clock if isinstance(self._clock, str) else self._clock.get(header.event)
        if clock is None:
            return _OUTSIDE
        earliest, latest = self._clocks.window(clock, *window)
        if self._follow is not None and latest > self._covered:
            self._covered, self._clocks = self._follow(latest)
            self.namer.forget()
            if latest > self._covered:  # The recorder does not get on: never wait again.
                self._follow = None
            if self._leeway is not None:
                self._leeway.until = max(self._leeway.until, self._covered)
        if self._leeway is None:
            return earliest, latest
        return self._leeway.widen(earliest, latest)


def region(frame: FrameLine) -> int:
    """USER, BESIDE or PASSES of a frame for itself; what stands behind the user's is the user's.

    The pages of [vsyscall] are in the kernel's half, and the user's code.
    """
    if len(frame.digits) < 16 or not _KERNEL_HALF <= frame.address < FIRST_MARKER:
        return USER
    dso = frame.dso or b""
    if dso == _VSYSCALL:
        return USER
    return BESIDE if dso == INLINED or dso.startswith(_GUEST) else PASSES


def perf_name(frame: FrameLine) -> tuple[str, str]:
    """perf's name and dso of a frame, each empty where it has none."""
    return _perf_name(frame.name, frame.dso)


@lru_cache(_MOST_NAMES)
def _perf_name(symbol: bytes, file: bytes | None) -> tuple[str, str]:
    dso = "" if file in (None, UNKNOWN) else strip_nul(decode_name(file or b""))
    if symbol == UNKNOWN:
        return "", dso
    name = strip_nul(decode_name(symbol))
    # A mark that an earlier run left.
    return (name.rstrip("?") if is_bpf_name(name.rstrip("?"), dso) else name), dso


def renamed(frame: FrameLine, decision: Decision, dso: str, has_offsets: bool = True) -> FrameLine:
    """A kernel frame with what ``Renamer.decide`` says of it; itself if that is perf's.

    Without ``has_offsets`` perf was asked to print none.
    """
    name, perf_dso = perf_name(frame)
    if decision == name or (decision is None and not name and dso == perf_dso):
        return frame
    offset = frame.offset
    if isinstance(decision, Frame):
        offset = b"+%#x" % decision.offset if offset or (has_offsets and not name) else b""
        decision = format_name(decision)
    elif decision is None:
        offset = b""
    symbol = UNKNOWN if decision is None else encode_name(decision)
    file = None if frame.dso is None else encode_name(dso) or UNKNOWN
    return FrameLine(frame.digits, frame.name_at, symbol, offset, file, frame.end)


def _rewritten(line: bytes, frame: FrameLine, other: FrameLine) -> bytes:
    """The line of a frame that may have become another."""
    if other is frame:
        return line
    file = b"" if other.dso is None else b" (%s)" % other.dso
    return b"".join((line[: frame.name_at], other.name, other.offset, file, line[frame.end :]))


class NotWithin(Exception):
    """A line can stand in no stack: it is a header, a comment, or junk."""


class Memo(dict["Name", "Piece"]):
    """What is made of lines or names, each made once; bounded, and without very long ones."""

    def __init__(self, make: Callable[[Any], Piece]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Name) -> Piece:
        made = self._make(key)
        if len(key) <= _LONGEST_KEPT:
            if len(self) >= _MOST_LINES:
                self.clear()
            self[key] = made
        return made


class Stack:
    """The frames of a sample as far as they have come, leaf first.

    ``pieces`` are what was made of their lines. ``passing`` are the places, lines and frames
    of those whose names depend on the time; each has None among the pieces. ``standing`` and
    ``nameless`` count kernel frames that are the same at all times.
    """

    __slots__ = ("in_kernel", "nameless", "passing", "pieces", "standing", "tail")

    def __init__(self) -> None:
        #: All but the leaf as text, once that is known.
        self.tail: bytes | None = None
        self.in_kernel = True
        self.pieces: list[Piece] = []
        self.passing: list[tuple[int, bytes, FrameLine]] = []
        self.standing = 0
        self.nameless = 0


class _Whole:
    """What was made of the frames of a sample, which other samples have too.

    It holds for those whose times their clock shows as ``since`` to ``until`` (ns). ``decided``
    is what was decided on the frames whose names depend on the time, ``names`` are perf's for
    them. ``standing`` and ``nameless`` count as in ``Stack``.
    """

    __slots__ = ("decided", "nameless", "names", "since", "standing", "until", "whole")

    def __init__(self, whole: Whole, decided: list[tuple[Decision, str]], names: list[str]) -> None:
        self.whole = whole
        self.decided = decided
        self.names = names
        self.since, self.until = 0, _ALWAYS
        self.standing = self.nameless = 0


class StackReader:
    """Reads text, fed in pieces of any size, a line or a whole sample at a time.

    It decides where the kernel's part of a stack ends, and has its frames named. A subclass
    makes something of each frame, of the pieces of a stack, and of a sample. Lines and whole
    stacks come again and again, so what was made of them is kept.
    """

    #: Whether it makes the same of all frames of a user's function, whatever their addresses.
    by_function = True
    #: Whether the line of a frame of the user's is all that it makes of it.
    passes_users = False

    def __init__(self, renamer: Renamer, locator: Locator | None = None) -> None:
        self._renamer = renamer
        self._locator = locator
        self._cutter = Cutter()
        self._headers = text.Headers()
        #: Whether a sample can begin here: at the start, and after a blank line.
        self._is_start = True
        #: The sample at hand, where it comes by line, and its first line.
        self._header: Header | None = None
        self._first = b""
        self._stack = Stack()
        #: What stands behind a leaf of the kernel's, and behind one of the user's. Leaves are at
        #: many addresses, their callers at few.
        self._stacks: tuple[dict[bytes, Stack], dict[bytes, Stack]] = ({}, {})
        #: What was made of a leaf and a stack behind it, and of the lines of all frames.
        self._joined: dict[tuple[Piece, Stack], Whole] = {}
        self._wholes: dict[bytes, _Whole] = {}
        self._kept = 0
        self._beyond = Memo(self._in_user_part)
        #: What was made of lines without their addresses and offsets.
        self._functions: dict[bytes, Piece] = {}
        self._callers = Memo(partial(self._in_kernel_part, is_leaf=False))
        self._leaves = Memo(self._as_leaf)

    # For a subclass

    def _user(self, line: bytes, frame: FrameLine) -> Piece:
        """What is made of a frame of the user's part; None for nothing."""
        raise NotImplementedError

    def _kernel(
        self, line: bytes, frame: FrameLine, decision: Decision, dso: str, is_leaf: bool
    ) -> Piece:
        """What is made of a frame of the kernel's part, and of what was decided of it."""
        raise NotImplementedError

    def _beside(self, line: bytes) -> Piece:
        """What is made of a source line or a line of blanks within a stack."""
        return None

    def _join(self, pieces: list[Piece]) -> Whole:
        """What is made of a stack."""
        raise NotImplementedError

    def _sample(self, header: Header, stack: Whole, line: bytes) -> None:
        """A sample; ``line`` is the header's."""
        raise NotImplementedError

    def _outside(self, line: bytes) -> None:
        """A line that is no part of a sample: a comment, a side-band record, or junk."""
        self._renamer.tally.unparsed += text.is_junk(line)

    # Reading

    def read(self, data: bytes) -> None:
        """Read the lines that have ended."""
        before, whole, after = self._cutter.cut(data)
        if before:
            self._too_long(before)
        if whole:
            self._lines(whole)
        if after:
            self._outside(b"")
            self._too_long(after)

    def end(self) -> None:
        """Read the rest: a last line without its end."""
        rest = self._cutter.rest()
        if rest:
            self._line(rest)
        self._end()

    def _too_long(self, part: bytes) -> None:
        """A part of a line that is too long for a frame or a header."""

    def _lines(self, whole: bytes) -> None:
        """Lines that have all ended."""
        *samples, rest = whole.split(b"\n\n")
        for sample in samples:
            if not (self._is_start and self._whole(sample)):
                for line in sample.split(b"\n"):
                    self._line(line)
                self._line(b"")
        for line in rest[:-1].split(b"\n") if rest else ():
            self._line(line)

    def _whole(self, sample: bytes) -> bool:
        """Take a sample that a blank line follows; False, and nothing done, if it is none."""
        first, _, frames = sample.partition(b"\n")
        header = self._headers.find(first)
        if header is None or not frames or (header.payload and header.payload.endswith(b")")):
            return False
        if self._header is not None or self._stack.pieces:
            self._end()
        renamer = self._renamer
        renamer.begin(header, first)
        kept = self._wholes.get(frames)
        if kept is None or (
            kept.until != _ALWAYS and not renamer.is_within(kept.since, kept.until)
        ):
            try:
                kept = self._made(frames, kept)
            except NotWithin:
                return False
        else:
            for name, (decision, _) in zip(kept.names, kept.decided):
                renamer.namer.count_again(decision, name)
        renamer.tally.confirmed += kept.standing
        if kept.nameless:
            renamer.count(0, kept.nameless)
        self._sample(header, kept.whole, first)
        return True

    def _made(self, frames: bytes, kept: _Whole | None) -> _Whole:
        """What is made of the lines of a sample's frames; ``kept`` was made at another time."""
        line, _, rest = frames.partition(b"\n")
        is_users = self.passes_users and line < _UPPER_HALF and text.are_usual(line)
        kind, leaf, frame = (USER, line, None) if is_users else self._leaves[line]
        callers = self._stacks[kind == USER].get(rest)
        if callers is None:
            callers = self._take_in(rest, kind != USER)
        if kind == PASSES or callers.passing:
            kept = self._at_its_time(line, leaf, frame, callers, kept)
        else:
            kept = _Whole(self._with_leaf(leaf, callers), [], [])
        kept.standing = callers.standing + (kind == STANDS)
        kept.nameless = callers.nameless + (kind == NAMELESS)
        if not is_users:  # They are at too many addresses to be kept.
            self._note_size(len(frames))
            self._wholes[frames] = kept
        return kept

    def _with_leaf(self, leaf: Piece, callers: Stack) -> Whole:
        """What is made of a stack that is the same at all times."""
        joined = self._joined.get((leaf, callers))
        if joined is None:
            joined = self._joined[leaf, callers] = self._join([leaf, *callers.pieces[1:]])
        return joined

    def _at_its_time(
        self,
        line: bytes,
        leaf: Piece,
        frame: FrameLine | None,
        callers: Stack,
        kept: _Whole | None,
    ) -> _Whole:
        """A stack of which some frames depend on the time; ``frame`` is the leaf if it does."""
        passing = callers.passing if frame is None else [(0, line, frame), *callers.passing]
        frames = [passed for _, _, passed in passing]
        decided, since, until = self._renamer.decide_all(frames)
        if kept is None or kept.decided != decided:
            pieces = [leaf, *callers.pieces[1:]]
            for (place, at, passed), decision in zip(passing, decided):
                pieces[place] = self._kernel(at, passed, *decision, not place)
            names = [perf_name(passed)[0] for passed in frames]
            kept = _Whole(self._join(pieces), decided, names)
        kept.since, kept.until = since, until
        return kept

    def _take_in(self, rest: bytes, in_kernel: bool) -> Stack:
        """A stack behind its leaf that was not met before."""
        stack = Stack()
        stack.in_kernel = in_kernel
        stack.pieces.append(None)  # The leaf's place.
        if rest:
            self._extend(stack, rest.split(b"\n"))
        self._note_size(len(rest))
        self._stacks[not in_kernel][rest] = stack
        return stack

    def _note_size(self, size: int) -> None:
        """So much more is kept of whole stacks."""
        self._kept += size + _STACK_SIZE
        if self._kept > _MOST_BYTES:
            self._kept = size + _STACK_SIZE
            for kept in (*self._stacks, self._wholes, self._joined):
                kept.clear()

    # By line

    def _line(self, line: bytes) -> Piece:
        """Take any line; what was made of it, the line itself if it is no frame."""
        if line in _BLANK:
            self._is_start = True
            if self._stack.pieces:  # It may stand between a header and its frames.
                self._end()
            return line
        header = text.header(line) if self._is_start else None
        if header is None:
            if not self._is_start or text.frame(line) is not None:
                try:
                    return self._within(line)
                except NotWithin:
                    header = text.header(line)
            if header is None:
                if self._is_start:  # Whatever follows, the sample before has ended.
                    self._end()
                self._outside(line)
                return line
        return self._begin(header, line)

    def _begin(self, header: Header, line: bytes) -> Piece:
        """A sample begins; what was made of the frame that may stand behind its header."""
        if self._header is not None or self._stack.pieces:
            self._end()
        self._is_start = False
        self._header, self._first = header, line
        self._renamer.begin(header, line)
        frame = text.payload_frame(line, header.payload)
        if frame is None:
            return line
        if region(frame) != PASSES:
            piece = self._user(line, frame)
        else:
            piece = self._kernel(line, frame, *self._renamer.decide(frame), True)
        self._stack.pieces.append(piece)
        return piece

    def _within(self, line: bytes) -> Piece:
        """A line of the sample at hand, or of none."""
        stack = self._stack
        if self._header is None:
            self._renamer.begin(None)
        self._extend(stack, [line])
        self._is_start = False
        if stack.passing:
            place, _, frame = stack.passing.pop()
            stack.pieces[place] = self._kernel(line, frame, *self._renamer.decide(frame), not place)
        return stack.pieces[-1]

    def _end(self) -> None:
        """The sample at hand has ended, if there is one."""
        stack = self._stack
        self._renamer.count(stack.standing, stack.nameless)
        if self._header is not None:
            self._sample(self._header, self._join(stack.pieces), self._first)
        self._header, self._stack = None, Stack()

    # Stacks

    def _extend(self, stack: Stack, lines: list[bytes]) -> None:
        """Take lines into a stack. NotWithin at the first that can be of none."""
        pieces = stack.pieces
        at = 0
        for line in lines if stack.in_kernel else ():
            if line < _UPPER_HALF and line.endswith(b")"):
                break
            kind, piece, frame = (self._callers if pieces else self._leaves)[line]
            if kind == USER:
                break
            at += 1
            if kind == PASSES:
                stack.passing.append((len(pieces), line, frame))
            stack.standing += kind == STANDS
            stack.nameless += kind == NAMELESS
            pieces.append(piece)
        if at < len(lines):
            beyond = b"\n".join(lines[at:]) if self.passes_users else b""
            if text.are_usual(beyond):
                pieces.append(beyond)
            else:
                pieces.extend(map(self._beyond.__getitem__, lines[at:]))
            stack.in_kernel = False  # Not before: junk, which raises, ends no part.

    def _as_leaf(self, line: bytes) -> tuple[int, Piece, FrameLine | None]:
        if not (line < _UPPER_HALF and line.endswith(b")")):
            found = self._in_kernel_part(line, True)
            if found[0] != USER:
                return found
        return USER, self._in_user_part(line), None

    def _in_kernel_part(self, line: bytes, is_leaf: bool) -> tuple[int, Piece, FrameLine | None]:
        """What a line is there, what is made of it, and its frame if that PASSES."""
        frame = _frame_within(line)
        if frame is None:
            return BESIDE, self._beside(line), None
        kind = region(frame)
        if kind == USER:
            return USER, None, None
        name, dso = perf_name(frame)
        if kind == PASSES:
            if not self._renamer.is_fixed(frame):
                return PASSES, None, frame
            kind = STANDS if name else NAMELESS
        return kind, self._kernel(line, frame, name or None, dso, is_leaf), None

    def _in_user_part(self, line: bytes) -> Piece:
        function = _function(line) if self.by_function else line
        piece = self._functions.get(function)
        if piece is not None:
            return piece
        frame = _frame_within(line)
        if frame is None:
            return self._beside(line)
        piece = self._user(line, frame)
        # Only if the parser agrees on where the name ends: names may hold such numbers.
        if function in (line[17:], b" %s\n (%s)" % (frame.name, frame.dso or b"")):
            if len(self._functions) >= _MOST_LINES:
                self._functions.clear()
            self._functions[function] = piece
        return piece


def _function(line: bytes) -> bytes:
    """A frame in perf's columns without address and offset, the line itself if it is none.

    The user's frames that are equal in that are of one function.
    """
    if not line < _UPPER_HALF or line[16:18].strip(_DIGITS) != b" ":
        return line
    if line[1:16].lstrip(b" ").strip(_DIGITS):
        return line
    plus = line.rfind(b"+0x")
    end = line.find(b" (", plus)
    if plus < 0 or end < plus + 4 or line[plus + 3 : end].strip(_DIGITS):
        return line[17:]
    return b"%s\n%s" % (line[17:plus], line[end:])


def _frame_within(line: bytes) -> FrameLine | None:
    """The frame that a line within a sample is; None for what may stand between frames.

    NotWithin for any other line.
    """
    parsed = text.parse(line, False)
    if isinstance(parsed, FrameLine):
        return parsed
    if parsed is None and (not line.strip() or text.is_source(line)):
        return None
    raise NotWithin


class Annotator(StackReader):
    """Text in, text out. ``feed`` takes any piece of it, ``close`` gives its end.

    With a ``locator`` a kernel frame's source location stands on a line below it.
    """

    by_function = False
    passes_users = True

    def __init__(self, renamer: Renamer, locator: Locator | None = None) -> None:
        super().__init__(renamer, locator)
        self.has_offsets = True
        #: Makes the first line of a sample, and where its time ends, what is printed.
        self._format_header: Callable[[bytes, int], bytes] = lambda line, _: line
        self._out: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """The text of all lines that have ended."""
        self.read(data)
        return self._taken()

    def close(self) -> bytes:
        """The rest: a last line without its end."""
        self.end()
        return self._taken()[:-1]

    def _taken(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out

    def _user(self, line: bytes, frame: FrameLine) -> bytes:
        return line

    def _kernel(
        self, line: bytes, frame: FrameLine, decision: Decision, dso: str, is_leaf: bool
    ) -> bytes:
        shown = renamed(frame, decision, dso, self.has_offsets)
        line = _rewritten(line, frame, shown)
        if self._locator is None:
            return line
        known = located(self._locator, frame.address, frame.distance, decision, dso, is_leaf)
        source = b"" if known is None else encode_name(below(known).rstrip("\n"))
        return line + b"\n" + source if source else line

    def _beside(self, line: bytes) -> bytes:
        return line

    def _join(self, pieces: list[bytes]) -> bytes:
        return b"\n".join(pieces)

    def _with_leaf(self, leaf: bytes, callers: Stack) -> bytes:
        if callers.tail is None:
            callers.tail = self._join([b"", *callers.pieces[1:]])
        return leaf + callers.tail

    def _sample(self, header: Header, stack: bytes, line: bytes) -> None:
        if self._header is None:  # By line it has been printed already.
            shown = self._format_header(line, len(line) - header.behind)
            self._out += (shown, b"\n", stack, b"\n\n")

    def _begin(self, header: Header, line: bytes) -> bytes:
        return self._format_header(super()._begin(header, line), len(line) - header.behind)

    def _line(self, line: bytes) -> bytes:
        made: bytes = super()._line(line)
        self._out += (made, b"\n")
        return made

    def _too_long(self, part: bytes) -> None:
        self._out.append(part)
