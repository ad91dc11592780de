"""The grammar of ``perf script`` text: what a line is, and where its parts lie.

Lines are bytes, as perf printed them, with or without their line end. A sample is a
header, then its frames, leaf first, then a blank line::

    comm pid[/tid] [cpu] seconds.fraction: [period] event: [payload]
    <tab>address symbol[+0xoffset] (dso)

Almost all of it may be missing or hold anything: a task, a symbol and a file may be
named as whoever owns them likes. So a header is read from its time, a frame from its
address and from its closing parenthesis, and whatever fits neither is neither. Reading
a line takes time in proportion to its length, whatever is in it.
"""

from __future__ import annotations

import re

#: A longer line is no frame and no header: it is passed on before its end has come.
LONGEST = 1 << 20
#: Some editors begin a file with it.
BOM = b"\xef\xbb\xbf"
UNKNOWN = b"[unknown]"
#: The dso of a function that was inlined into the frame below it, whose address it has.
INLINED = b"inlined"

_BLANKS = b" \t\r\n"
_TIMED = (
    rb"(?P<pid>-?\d+)(?:/(?P<tid>-?\d+))?[ \t]+(?:\[\d+\][ \t]+)?"
    rb"\d+\.(?P<fraction>\d{1,9}):(?P<rest>.*)"
)
#: A task's name has 15 bytes at the most; of what looks like a time, the last one that
#: such a name can stand before is the time.
_HEADER = re.compile(rb"(?:(?P<comm>.{0,15}\S)[ \t]+)?" + _TIMED, re.DOTALL)
#: The same behind a longer name, which other tools write.
_LATER = re.compile(rb"(?<=[ \t])" + _TIMED, re.DOTALL)
#: ``perf script -F`` without pid and tid.
_TIME = re.compile(
    rb"(?<![^ \t])\d+\.(?P<fraction>\d{6}|\d{9}):(?![^ \t\r])(?P<rest>.*)", re.DOTALL
)
#: ``java 19983 cycles:``, as old perfs print it, or ``java 19983/19990`` without the event.
_WITHOUT_TIME = re.compile(rb"(.*\S)\s+(\d+)(?:/(\d+))?(?:\s+\[\d+\])?(?:\s+(\S*):)?", re.DOTALL)
_EVENT = re.compile(rb"[ \t]*(?:(\d+)[ \t]+)?(\S+):(?:[ \t]+(.*))?\Z", re.DOTALL)
RECORD = b"PERF_RECORD_"

_ADDRESS = re.compile(rb"[ \t]*([0-9a-f]{1,16})[ \t]")
_OFFSET = re.compile(rb"\+0x[0-9a-f]+\Z")
#: A frame as perf prints most of them, at a glance: its file's name has no parenthesis.
_FRAME = re.compile(rb"\t *([0-9a-f]{1,16})(?<=\t.{16}) (\S.*) \(([^()]*)\)", re.DOTALL)
#: Lines of such frames.
_FRAMES = re.compile(rb"(?:\t *[0-9a-f]{1,16}(?<=\t.{16}) \S[^\n]* \([^()\n]*\)(?:\n|\Z))+")
#: perf right-aligns addresses in 16 columns, after a tab in a callchain.
_ALIGNED = 17
#: What can be an address in a payload. Numbers that are shorter than ``_LONG`` and stand in no
#: column are mostly something else.
_WORD = re.compile(rb"(?<![^ \t])[0-9a-f]{1,16}(?=[ \t])")
_LONG = 9
#: Digits of a number at the most, and of a time's seconds.
_LONGEST_NUMBER = 18
_LONGEST_SECONDS = 12
#: How many headers are kept, and the longest.
_MOST_HEADERS = 1 << 12
_LONGEST_KEPT = 1 << 10
_BRANCH = b" => "


class Cutter:
    """Whole lines of a text that comes in pieces of any size."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._size = 0
        self._is_endless = False

    def cut(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        """The end of a line that is too long for a frame or header, whole lines, and the
        beginning of another such line. The beginning of any other line waits for its end."""
        before = after = whole = b""
        if self._is_endless:
            end = data.find(b"\n") + 1
            if not end:
                return data, b"", b""
            self._is_endless = False
            before, data = data[:end], data[end:]
        end = data.rfind(b"\n") + 1
        if end:
            whole = b"".join((*self._begun, data[:end]))
            self._begun, self._size = [], 0
        if end < len(data):
            self._begun.append(data[end:])
            self._size += len(data) - end
        if self._size > LONGEST:
            self._is_endless = True
            after = self.rest()
        return before, whole, after

    def rest(self) -> bytes:
        """The beginning of a line whose end has not come; it is forgotten."""
        rest = b"".join(self._begun)
        self._begun, self._size = [], 0
        return rest


class Header:
    """The first line of a sample; a part that is not there is empty.

    Its time stands in the line: ``behind`` is how much follows that, ``digits`` how many digits
    it has after the dot, 0 where there is none. ``pid`` is the process where both are printed.
    ``period`` is 1 where none is. ``payload`` is what follows the event: a tracepoint's fields,
    and the only frame where perf printed no callchain.
    """

    __slots__ = ("behind", "comm", "digits", "event", "payload", "period", "pid", "tid")

    def __init__(
        self,
        comm: bytes,
        pid: bytes,
        tid: bytes,
        event: tuple[bytes, bytes, bytes],
        behind: int = 0,
        digits: int = 0,
    ) -> None:
        self.comm = comm
        self.pid = pid
        self.tid = tid
        period, self.event, self.payload = event
        self.period = (int(period) if len(period) <= _LONGEST_NUMBER and period else 1) or 1
        self.behind = behind
        self.digits = digits

    def window(self, line: bytes) -> tuple[int, int] | None:
        """First and last ns that the time in a line with this header can stand for; None without
        one. perf cuts it off after the last digit."""
        if not self.digits:
            return None
        end = len(line) - self.behind
        dot = end - self.digits - 1
        seconds = line[:dot].lstrip(BOM).rsplit(None, 1)[-1]
        if len(seconds) > _LONGEST_SECONDS:
            return None
        unit = 10 ** (9 - self.digits)
        earliest = int(seconds + line[dot + 1 : end]) * unit
        return earliest, earliest + unit - 1


class FrameLine:
    """A frame and where it stands: ``line[name_at:end]`` is symbol, offset and dso.

    ``name`` is the symbol as printed, without ``offset`` (``+0x1f``, or empty). ``dso`` is
    None where perf prints none.
    """

    __slots__ = ("digits", "dso", "end", "name", "name_at", "offset")

    def __init__(
        self, digits: bytes, name_at: int, name: bytes, offset: bytes, dso: bytes | None, end: int
    ) -> None:
        self.digits = digits
        self.name_at = name_at
        self.name = name
        self.offset = offset
        self.dso = dso
        self.end = end

    @property
    def address(self) -> int:
        return int(self.digits, 16)

    @property
    def distance(self) -> int | None:
        """How far behind the beginning of its symbol; None where perf does not tell."""
        return int(self.offset, 16) if self.offset else None


def header(line: bytes) -> Header | None:
    """The header that a line is, or None. A side-band record is none."""
    found = timed(line)
    return None if found is None or found.event == RECORD else found


def timed(line: bytes) -> Header | None:
    """What begins as a header does; RECORD is the event of a side-band record."""
    blanks = len(line) - len(line.rstrip(_BLANKS))
    line = (line[3:] if line.startswith(BOM) else line).strip(_BLANKS)
    found = _HEADER.match(line) or _LATER.search(line) or _TIME.search(line)
    if found is None:
        return _without_time(line)
    parts = found.groupdict(b"")
    comm = parts.get("comm", line[: found.start()].rstrip(_BLANKS))
    pid, tid = parts.get("pid", b""), parts.get("tid", b"")
    if not tid:
        pid, tid = b"", pid
    rest = parts["rest"]
    return Header(comm, pid, tid, _event(rest), 1 + len(rest) + blanks, len(parts["fraction"]))


class Headers:
    """Headers, by what stands before and behind their times: that comes again and again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, bytes, int], Header] = {}

    def find(self, line: bytes) -> Header | None:
        """The header that a line is, or None."""
        before, _, behind = line.rpartition(b".")
        before, _, seconds = before.rpartition(b" ")
        fraction, colon, behind = behind.partition(b":")
        is_time = colon and seconds.isdigit() and fraction.isdigit()
        if not is_time or len(line) > _LONGEST_KEPT:
            return header(line)
        parts = before, behind, len(fraction)
        found = self._kept.get(parts)
        if found is None:
            found = header(line)
            # Only if the parser agrees on where the time is: tasks may be named like one.
            if found is not None and found.behind == 1 + len(behind):
                if len(self._kept) >= _MOST_HEADERS:
                    self._kept.clear()
                self._kept[parts] = found
        return found


def parse(line: bytes, is_start: bool) -> Header | FrameLine | None:
    """What a line is: a header, a frame, or neither.

    ``is_start`` says that a sample can begin here, as it can after a blank line. Within
    a sample a line that looks like both is a frame if it begins as perf's frames do:
    there is output that has no blank lines, and there are tasks named like an address.
    """
    if not is_start and line.startswith(b"\t"):
        return frame(line) or header(line)
    return header(line) or frame(line)


def _without_time(line: bytes) -> Header | None:
    found = _WITHOUT_TIME.fullmatch(line)
    if found is None:
        return None
    comm, pid, tid, event = found.groups()
    if tid is None:
        if event is None:
            return None  # Any text can end in a number.
        pid, tid = b"", pid
    return Header(comm, pid, tid, (b"", event or b"", b""))


def is_source(line: bytes) -> bool:
    """Whether a line that is neither header nor frame tells of the frame above it.

    ``  file.c:12``, as ``perf script -F +srcline`` and ``ksym script --lines`` print it.
    """
    return line.startswith(b"  ") and line[2:3] not in (b" ", b"\t")


def is_junk(line: bytes) -> bool:
    """Whether a line that is neither header nor frame is nothing that perf prints.

    Besides those it prints comments, source lines, and side-band records (perf script
    --show-…-events).
    """
    return not (line.startswith(b"#") or RECORD in line or is_source(line))


def _event(rest: bytes) -> tuple[bytes, bytes, bytes]:
    """Period, event and payload of what follows the time."""
    if rest.lstrip(_BLANKS).startswith(RECORD):
        return b"", RECORD, rest
    found = _EVENT.match(rest)
    return (b"", b"", rest) if found is None else (found[1] or b"", found[2], found[3] or b"")


def are_usual(lines: bytes) -> bool:
    """Whether all of some lines are frames as perf prints most of them."""
    return _FRAMES.fullmatch(lines) is not None


def frame(line: bytes) -> FrameLine | None:
    """The frame that a line is, or None."""
    found = _FRAME.fullmatch(line)
    if found is not None:
        digits, symbol, dso = found.groups()
        return _frame(digits, symbol, dso, _ALIGNED + 1, len(line))
    found = _ADDRESS.match(line)
    return None if found is None else _frame_at(line, found.start(1), found.end(1))


def payload_frame(line: bytes, payload: bytes) -> FrameLine | None:
    """The frame that a header's payload ends in, in its place in ``line``.

    Numbers of a tracepoint are not taken for one, nor the two ends of a branch.
    """
    if not payload.rstrip(_BLANKS).endswith(b")") or _BRANCH in payload:
        return None
    at = line.rindex(payload)
    words = [found.span() for found in _WORD.finditer(line, at)]
    in_column = [word for word in words if not line[word[1] - _ALIGNED : word[0]].strip(b" ")]
    long = [word for word in words if word[1] - word[0] >= _LONG]
    found = in_column or long or [word for word in words[:1] if word[0] == at]
    return _frame_at(line, *found[-1]) if found else None


def _frame_at(line: bytes, start: int, stop: int) -> FrameLine | None:
    """The frame whose address is ``line[start:stop]``."""
    digits = line[start:stop]
    end = len(line.rstrip(_BLANKS))
    opening = _opening(line, stop, end)
    if opening is None:
        # Only where the address stands as perf aligns it: a line of text is no frame.
        if stop != _ALIGNED or line[:1] != b"\t" or stop >= end:
            return None
        dso, symbol_end = None, end
    else:
        dso, symbol_end = line[opening + 1 : end - 1], opening - 1
    symbol = line[stop:symbol_end].lstrip(_BLANKS)
    name_at = symbol_end - len(symbol)
    return _frame(digits, symbol, dso, name_at, end)


def _frame(digits: bytes, symbol: bytes, dso: bytes | None, name_at: int, end: int) -> FrameLine:
    at = symbol.rfind(b"+0x")
    if at < 0 or not _OFFSET.match(symbol, at):
        return FrameLine(digits, name_at, symbol, b"", dso, end)
    return FrameLine(digits, name_at, symbol[:at].rstrip(_BLANKS), symbol[at:], dso, end)


def _opening(line: bytes, start: int, end: int) -> int | None:
    """Where the parenthesis opens that ``line[:end]`` closes with, after a blank.

    That is the dso's, which can hold others: ``(/memfd:jit (deleted))``.
    """
    if end <= start or line[end - 1 : end] != b")":
        return None
    last = opening = line.rfind(b" (", start, end)
    until, depth = end, 0
    while opening >= 0:
        depth += line.count(b")", opening, until) - line.count(b"(", opening, until)
        if depth == 0:
            return opening + 1
        until = opening
        opening = line.rfind(b" (", start, opening)
    return last + 1 if last >= 0 else None


def without_dso(line: bytes) -> bytes:
    """The line of a frame without its dso; ``(inlined)`` stays, as perf has it."""
    end = len(line.rstrip(_BLANKS))
    opening = _opening(line, 0, end)
    if opening is None or line[opening + 1 : end - 1] == INLINED:
        return line
    return line[: opening - 1] + line[end:]
