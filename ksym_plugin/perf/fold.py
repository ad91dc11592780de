"""``perf script`` text to folded stacks: ``task;root;…;leaf count``, one line a stack.

The same frames come again and again. So each line's part of a folded stack is cached, and a
sample of known lines is a few look-ups and a join.
"""

from __future__ import annotations

import os
import re
import subprocess

from ksym_plugin.perf import text
from ksym_plugin.perf.repaint import SLOW, Weights, rewritten
from ksym_plugin.perf.repaint import is_kernel as is_this_kernel
from ksym_plugin.perf.text import INLINED, UNKNOWN
from ksym_plugin.stacks.names import bytes_for_stacks
from ksym_plugin.timeline.symbols import split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ksym_plugin.perf.repaint import Renamer
    from ksym_plugin.perf.text import FrameLine

_KERNEL_HALF_DIGITS = b"89abcdef"
_BPF_DSO = b"[bpf]"
_ANONYMOUS = b"(anonymous namespace)"
#: A just-in-time compiler's inlined functions: ``A->B->C``; C++ has an operator of that name.
_INLINING = re.compile(rb"(?<!operator)->")
#: Brackets, and C++'s operators that are written with some.
_BRACKET = re.compile(rb"operator(?:->\*?|<=>|<<=?|>>=?|[<>]=?)|[<>(){}\[\]]")
_OPENING = frozenset(b"<({[")
_MODULE_FILE = re.compile(rb"\.ko(?:\.[a-z0-9]{2,4})?\Z")
_IMAGE_FILE = re.compile(rb"vmlinux[A-Za-z0-9._-]*\Z")
_JIT_FILE = re.compile(rb"/tmp/perf-[0-9]+\.map|/jitted-[^/]*\.so\Z")
_QUOTES = b"\"'"
_BRACKETED = re.compile(rb"\[[^\]]*\]")
#: A frame as perf aligns it: the parts besides its address and offset, if it has one.
_FUNCTION = re.compile(
    rb"\t *[0-9a-f]+(?<=\t.{16}) (?:(.*\S)\+0x[0-9a-f]+( \(.*\))|(.*\)))", re.DOTALL
)
#: Digits of a period at the most.
_LONGEST_COUNT = 18
#: What has no file that addr2line could read.
_NO_FILE = re.compile(rb"perf-\d+.map|kernel\.|\[[^\]]+\]")
#: A line of nm; one without an address is of another file.
_SYMBOL = re.compile(rb"([0-9a-f]+) \S (.*)")
_DISCRIMINATOR = re.compile(rb" \(discriminator \S+\)")
#: What addr2line prints of an address that it knows nothing of.
_NO_ANSWER = (b"", b"??", b"??:??:0")
#: addr2line reads whole debug information; some programs have gigabytes of it.
_SECONDS = 120


class FoldOptions:
    """How to fold; by default as stackcollapse-perf.pl does.

    ``kernel``, ``bpf`` and ``jit`` mark such frames with ``_[k]``, ``_[b]`` and ``_[j]``; BPF
    frames are the kernel's without ``bpf``. ``addrs`` keeps the addresses of frames without
    a symbol. ``pid`` and ``tid`` tell tasks of one name apart. ``event`` is the only one
    counted, None for the first that comes. ``srcline`` says that a line with the source
    follows each frame (perf script -F +srcline). ``inline`` asks addr2line what was inlined,
    with ``context`` also for source lines.
    """

    kernel = bpf = jit = addrs = pid = tid = srcline = inline = context = False
    event: bytes | None = None

    def __init__(self, **chosen: bool | bytes | None) -> None:
        for name, value in chosen.items():
            setattr(self, name, value)


class Inliner:
    """``expand`` a frame; with ``context`` each function has its source line behind it."""

    def __init__(self, context: bool = False) -> None:
        self._context = context
        self._symbols: dict[bytes, dict[bytes, int]] = {}

    def expand(self, frame: FrameLine) -> bytes:
        """The functions at a frame's address, outermost first; empty if nobody knows."""
        file = frame.dso or b""
        if _NO_FILE.search(file) or not os.path.isfile(file):
            return b""
        answer = _output_of(
            "addr2line", "-a", b"0x" + frame.digits, "-e", file, "-i", "-f", "-s", "-C"
        )
        if b"??\n??:0" in answer and frame.offset:
            # The address is the process's, not the file's: go by the symbol.
            start = self._table(file).get(frame.name)
            if start is not None:
                place = b"%#x" % (start + int(frame.offset, 16))
                answer = _output_of("addr2line", "-a", place, "-e", file, "-i", "-f", "-s", "-C")
        joined = b";".join(reversed(self._functions(answer)))
        return b"" if joined in _NO_ANSWER else joined

    def _functions(self, answer: bytes) -> list[bytes]:
        """Function and place take turns, behind the address; the innermost comes first."""
        lines = [_DISCRIMINATOR.sub(b"", line) for line in answer.splitlines()[1:]]
        lines = [line.replace(b";", b":") for line in lines]
        if not self._context:
            return lines[::2]
        return [b"%s:%s" % pair for pair in zip(lines[::2], lines[1::2])]

    def _table(self, file: bytes) -> dict[bytes, int]:
        table = self._symbols.get(file)
        if table is None:
            table = self._symbols[file] = {}
            for line in _output_of("nm", "--", file).splitlines():
                found = _SYMBOL.fullmatch(line)
                if found is not None:
                    table.setdefault(found[2], int(found[1], 16))
        return table


def _output_of(*words: str | bytes) -> bytes:
    """What a program prints; nothing if it cannot be run."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return b""
    return done.stdout


def format_frame(frame: FrameLine, how: FoldOptions, is_java: bool) -> bytes:
    """A frame's part of a folded stack; empty if it has none.

    Functions that a JIT compiler has inlined become frames of their own, outermost first.
    """
    dso = frame.dso or UNKNOWN
    symbol = frame.name
    if not symbol and frame.dso is not None:
        symbol = UNKNOWN if frame.offset or not dso else b" "
    if symbol.startswith(b"(") and not symbol.startswith(_ANONYMOUS):
        return b""  # A task's name, as old perfs print it.
    suffix = _suffix(frame, dso, how)
    names: list[bytes] = []
    for name in _INLINING.split(symbol):
        tidy = format_function(_in_file(frame, dso, how) if name == UNKNOWN else name)
        if is_java and tidy.startswith(b"L") and b"/" in tidy:
            tidy = tidy[1:]
        end = b"_[i]" if names else suffix
        names.append(tidy if end in tidy else tidy + end)
    return b";".join(names)


def format_task(comm: bytes) -> bytes:
    """The name of a task as the first frame of its stacks."""
    return bytes_for_stacks(comm).replace(b" ", b"_")


def format_function(name: bytes) -> bytes:
    """A name without its arguments, quotes, and what separates frames and stacks."""
    return _without_arguments(bytes_for_stacks(name)).translate(None, _QUOTES)


def _without_arguments(name: bytes) -> bytes:
    """A name up to its outermost parenthesis; not Go's ``pkg.(*T).f`` nor a lambda's own."""
    if b"(" not in name:
        return name
    depth = 0
    for found in _BRACKET.finditer(name):
        at = found.start()
        if found.end() - at > 1:
            continue
        if name[at] not in _OPENING:
            depth = max(depth - 1, 0)
            continue
        if name[at] == 0x28 and depth == 0 and at:
            is_of_name = name.startswith(_ANONYMOUS, at) or name[at - 1] == 0x2E
            if not is_of_name:
                return name[:at]
        depth += 1
    return name


def _in_file(frame: FrameLine, dso: bytes, how: FoldOptions) -> bytes:
    """A frame without a symbol."""
    file = b"unknown" if dso in (UNKNOWN, b"") else dso.rpartition(b"/")[2]
    return b"[%s <%s>]" % (file, frame.digits) if how.addrs else b"[%s]" % file


def _suffix(frame: FrameLine, dso: bytes, how: FoldOptions) -> bytes:
    if how.bpf and is_bpf(frame):
        return b"_[b]"
    if how.kernel and is_kernel(frame):
        return b"_[k]"
    if how.jit and _JIT_FILE.search(dso):
        return b"_[j]"
    return b""


def is_bpf(frame: FrameLine) -> bool:
    """Whether a frame is in the kernel and says that it is BPF's."""
    if not _is_high(frame):
        return False
    if frame.dso == _BPF_DSO or (frame.dso not in (None, b"", UNKNOWN) and frame.dso == frame.name):
        return True
    name = frame.name.decode("ascii", "replace").rstrip("?")
    return split_bpf_name(name) is not None


def is_kernel(frame: FrameLine) -> bool:
    """Whether a frame is kernel code, by its file, or where that does not say by its address."""
    dso = frame.dso
    if dso is None:
        return _is_high(frame)
    if dso in (UNKNOWN, b"", INLINED):
        return False
    if dso.startswith(b"[") or _MODULE_FILE.search(dso) or _IMAGE_FILE.search(dso):
        return True
    return is_bpf(frame)


def _is_high(frame: FrameLine) -> bool:
    return len(frame.digits) == 16 and frame.digits[0] in _KERNEL_HALF_DIGITS


class Pieces(dict[bytes, "bytes | None"]):
    """The folded text of lines within a sample; None for a line that folds to nothing.

    A function is sampled at many addresses. Its lines differ in two numbers that are not
    folded, so the text is also cached by what is left without them.
    """

    def __init__(self, options: FoldOptions, is_java: bool) -> None:
        super().__init__()
        self._how = options
        self._is_java = is_java
        self._inliner = Inliner(options.context) if options.inline else None
        #: By function, for the lower half of the address space and the upper.
        self._functions: tuple[dict[bytes, bytes], dict[bytes, bytes]] = ({}, {})

    def __missing__(self, line: bytes) -> bytes | None:
        found = _FUNCTION.fullmatch(line)
        # 16 digits of which the first is 8 or above.
        functions = self._functions[line[1:2] > b"7"]
        key = b""
        if found is not None and not self._depends_on_address(line):
            key = found[3] or found[1] + b"+0x" + found[2]
        piece = functions.get(key)
        if piece is None:
            frame = text.parse(line, False)
            if not isinstance(frame, text.FrameLine):
                return None
            piece = self._format(frame)
            if not piece:
                return None
            # Only if the parser agrees on where the name ends: names may hold such numbers.
            if found is not None and key and (found[3] or frame.name == found[1].lstrip()):
                text.keep(functions, key, piece)
        text.keep(self, line, piece)
        return piece

    def _depends_on_address(self, line: bytes) -> bool:
        return self._inliner is not None or (self._how.addrs and UNKNOWN in line)

    def _format(self, frame: text.FrameLine) -> bytes:
        piece = self._inliner.expand(frame) if self._inliner is not None else b""
        return piece or format_frame(frame, self._how, self._is_java)


class Sums:
    """What a text was folded to: ``counts`` by stack.

    ``passed_over`` counts samples of other events, by event, and ``unparsed`` lines that
    are neither header nor frame.
    """

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}
        self.passed_over: dict[bytes, int] = {}
        self.unparsed = 0

    def add(self, other: Sums) -> None:
        """Take in the stacks of another part of the same text."""
        for mine, theirs in (
            (self.counts, other.counts),
            (self.passed_over, other.passed_over),
        ):
            for what, count in theirs.items():
                mine[what] = mine.get(what, 0) + count
        self.unparsed += other.unparsed

    def lines(self) -> Iterable[bytes]:
        """The folded stacks in order, each with its line end."""
        return (b"%s %d\n" % (stack, self.counts[stack]) for stack in sorted(self.counts))


class Folder(text.TextReader):
    """Text in by ``feed``, ``close`` at its end; ``sums`` is the result.

    With a ``renamer`` kernel frames are repaired first.
    """

    def __init__(self, options: FoldOptions, renamer: Renamer | None = None) -> None:
        super().__init__()
        self.sums = Sums()
        #: The event that is counted, once it is known.
        self.event = options.event
        self._counts = self.sums.counts
        self._options = options
        self._renamer = renamer
        self._weights = Weights(renamer) if renamer is not None else None
        self._native = Pieces(options, False)
        self._java = Pieces(options, True)
        #: The sample at hand: its task, or None if it is of another event or has ended.
        self._task: bytes | None = None
        self._pieces = self._native
        self._period = 1
        self._stack: list[bytes] = []
        self._awaits_source = False

    def feed(self, data: bytes) -> None:
        _, whole, after = self._cutter.cut(data)
        self.sums.unparsed += bool(after)
        if whole:
            self._lines(whole)

    def close(self) -> None:
        rest = self._cutter.rest()
        if rest:
            self._line(rest)
        self._finish()

    def _lines(self, whole: bytes) -> None:
        pieces = whole[:-1].split(b"\n\n")
        last = len(pieces) - 1
        for at, piece in enumerate(pieces):
            if at:
                self._blank()
            # Of the last one more may follow.
            if not (self._is_start and at < last and self._sample(piece)):
                for line in piece.split(b"\n"):
                    self._line(line)

    def _sample(self, piece: bytes) -> bool:
        """Take a whole sample; False, and nothing done, if it does not begin with a header."""
        lines = self._begin_whole(piece)
        if lines and not self._count(lines):
            for line in lines:
                self._line_within(line)
        return lines is not None

    def _line_within(self, line: bytes) -> None:
        """A line of a sample, which may have been folded before."""
        if self._is_start:  # After a line of blanks: this can be a header.
            self._line(line)
            return
        piece = self._pieces[line]
        weight = 0 if self._weights is None else self._weights[line]
        if piece is None or weight >= SLOW or self._task is None:
            self._line(line)
            return
        self._stack.append(piece)
        self._awaits_source = self._options.srcline
        if self._renamer is not None:
            self._renamer.count(weight)

    def _count(self, lines: list[bytes]) -> bool:
        """Count a sample with these frames; False, and nothing done, if they are no such."""
        stack = list(map(self._pieces.__getitem__, lines))
        if self._task is None:
            return None not in stack
        weight = sum(map(self._weights.__getitem__, lines)) if self._weights is not None else 0
        if weight >= SLOW:
            return False
        stack.append(self._task)
        stack.reverse()
        try:
            joined = b";".join(stack)  # type: ignore[arg-type]
        except TypeError:  # None is among them; to look for it first costs much more.
            return False
        if self._renamer is not None:
            self._renamer.count(weight)
        self._counts[joined] = self._counts.get(joined, 0) + self._period
        self._task = None
        return True

    def _begin(self, header: text.Header) -> None:
        self._finish()
        self._is_start = False
        if header.event and header.event != self.event:
            if self.event is not None:
                others = self.sums.passed_over
                others[header.event] = others.get(header.event, 0) + 1
                return
            self.event = header.event
        if self._renamer is not None:
            self._renamer.begin(header)
        period = header.period
        self._period = (int(period) if len(period) <= _LONGEST_COUNT else 0) if period else 1
        self._period = self._period or 1
        name = header.comm
        if self._options.tid:
            name += b"-%s/%s" % (header.pid or b"?", header.tid)
        elif self._options.pid:
            name += b"-" + (header.pid or b"?")
        self._task = format_task(name)
        self._pieces = self._java if name.startswith(b"java") else self._native

    def _blank(self) -> None:
        self._is_start = True
        self._awaits_source = False
        if self._stack:
            self._finish()

    def _finish(self) -> None:
        """Count the sample at hand; one without any frame is its task's."""
        if self._task is not None:
            self._stack.append(self._task)
            self._stack.reverse()
            stack = b";".join(self._stack)
            self._counts[stack] = self._counts.get(stack, 0) + self._period
        self._stack = []
        self._task = None

    def _other(self, line: bytes) -> bytes:
        if self._awaits_source:
            self._awaits_source = False
            self._source(line)
        else:
            if self._is_start:  # Whatever follows, the sample before has ended.
                self._finish()
            self.sums.unparsed += text.is_junk(line)
        return line

    def _frame(self, line: bytes, frame: text.FrameLine) -> bytes:
        if self._task is None:
            return line
        self._is_start = False
        if self._renamer is not None and is_this_kernel(frame):
            line = rewritten(line, frame, *self._renamer.decide(frame))
        # Of a frame behind a header the part that is its own.
        own = line[line.rindex(frame.digits, 0, frame.name_at) :]
        piece = self._pieces[b"\t" + b" " * (16 - len(frame.digits)) + own]
        if piece is not None:
            self._stack.append(piece)
            self._awaits_source = self._options.srcline
        return line

    def _source(self, line: bytes) -> None:
        """Where the last frame's code is; in brackets, an address where that is not known."""
        source = bytes_for_stacks(_BRACKETED.sub(b"", line).strip())
        if source and self._stack:
            self._stack[-1] += b":" + source
