"""``perf script`` text to folded stacks: ``task;root;…;leaf count``, one line a stack."""

from __future__ import annotations

import os
import re
import subprocess

from ksym_plugin.perf import text
from ksym_plugin.perf.repaint import Renamer, StackReader, renamed
from ksym_plugin.perf.text import INLINED, UNKNOWN
from ksym_plugin.stacks.frames import Counts
from ksym_plugin.stacks.names import bytes_for_stacks
from ksym_plugin.timeline.symbols import split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Union

    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.text import FrameLine, Header

    #: A frame's part of a folded stack; the source of the frame above; or nothing.
    Piece = Union[bytes, tuple[bytes], None]

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
_PYTHON = b"py::"
_UNKNOWN_TASK = b"[unknown]"
_BRACKETED = re.compile(rb"\[[^\]]*\]")
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
    a symbol. ``pid`` and ``tid`` tell tasks of one name apart. ``samples`` counts those, and
    not their periods. ``srcline`` says that a line with the source follows each frame (perf
    script -F +srcline). ``inline`` asks addr2line what was inlined, with ``context`` also for
    source lines.
    """

    kernel = bpf = jit = addrs = pid = tid = samples = srcline = inline = context = False

    def __init__(self, **chosen: bool) -> None:
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
        answer = _ask(b"0x" + frame.digits, file)
        if b"??\n??:0" in answer and frame.offset:
            # The address is the process's, not the file's: go by the symbol.
            start = self._table(file).get(frame.name)
            if start is not None:
                answer = _ask(b"%#x" % (start + int(frame.offset, 16)), file)
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


def _ask(address: bytes, file: bytes) -> bytes:
    return _output_of("addr2line", "-a", address, "-e", file, "-i", "-f", "-s", "-C")


def _output_of(*words: str | bytes) -> bytes:
    """What a program prints; nothing if it cannot be run."""
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return b""


def format_frame(frame: FrameLine, how: FoldOptions) -> bytes | None:
    """A frame's part of a folded stack; None if it has none.

    Functions that a JIT compiler has inlined become frames of their own, outermost first.
    """
    dso = frame.dso or UNKNOWN
    symbol = frame.name
    if not symbol and frame.dso is not None:
        symbol = UNKNOWN if frame.offset or not dso else b" "
    if symbol.startswith(b"(") and not symbol.startswith(_ANONYMOUS):
        return None  # A task's name, as old perfs print it.
    suffix = _suffix(frame, dso, how)
    names: list[bytes] = []
    for name in _INLINING.split(symbol):
        tidy = format_function(_in_file(frame, dso, how) if name == UNKNOWN else name)
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
    """A name up to its outermost parenthesis; not Go's ``pkg.(*T).f`` nor a lambda's own.

    Behind a function of Python stands its file, whose name may hold any.
    """
    if b"(" not in name or name.startswith(_PYTHON):
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
    name = frame.name.rstrip(b"?")
    if frame.dso == _BPF_DSO or (frame.dso not in (None, b"", UNKNOWN) and frame.dso == name):
        return True
    return split_bpf_name(name.decode("ascii", "replace")) is not None


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


class Sums:
    """What a text was folded to, by event; ``unparsed`` lines are neither header nor frame."""

    def __init__(self) -> None:
        #: By task and stack.
        self.counts: Counts[bytes, tuple[bytes, bytes]] = Counts()
        self.unparsed = 0

    def add(self, other: Sums) -> None:
        """Take in the stacks of another part of the same text."""
        self.counts.take_in(other.counts)
        self.unparsed += other.unparsed

    def folded(self, event: bytes | None) -> dict[bytes, int]:
        """Counts by folded stack, of an event."""
        folded: dict[bytes, int] = {}
        counts = self.counts[event] if event is not None else {}
        for (task, stack), count in counts.items():
            whole = _with_task(task, stack)
            folded[whole] = folded.get(whole, 0) + count
        return folded

    def lines(self, event: bytes | None) -> Iterable[bytes]:
        """The folded stacks of an event in order, each with its line end."""
        return (b"%s %d\n" % counted for counted in sorted(self.folded(event).items()))


def _with_task(task: bytes, stack: bytes) -> bytes:
    name = format_task(task) or _UNKNOWN_TASK
    if name.startswith(b"java"):  # Java's classes are written without their L.
        frames = stack.split(b";")
        stack = b";".join([f[1:] if f[:1] == b"L" and b"/" in f else f for f in frames])
    return b"%s;%s" % (name, stack) if stack else name


class PerfNames(Renamer):
    """Leaves all frames under perf's names, and counts none."""

    def is_fixed(self, frame: FrameLine) -> bool:
        """Whatever the time is."""
        return True


class Folder(StackReader):
    """Text in by ``read``, ``end`` at its end; ``sums`` is the result.

    With a ``renamer`` kernel frames are repaired first.
    """

    def __init__(self, options: FoldOptions, renamer: Renamer | None = None) -> None:
        super().__init__(renamer or PerfNames())
        self.sums = Sums()
        self._options = options
        self._inliner = Inliner(options.context) if options.inline else None
        self.by_function = not (options.addrs or options.inline)

    def _user(self, _line: bytes, frame: FrameLine) -> Piece:
        inlined = self._inliner.expand(frame) if self._inliner is not None else b""
        return inlined or format_frame(frame, self._options)

    def _kernel(
        self, line: bytes, frame: FrameLine, decision: Decision, dso: str, _is_leaf: bool
    ) -> Piece:
        return self._user(line, renamed(frame, decision, dso))

    def _beside(self, line: bytes) -> Piece:
        """Where the frame above has its code; in brackets, an address where that is not known."""
        if not self._options.srcline:
            return None
        return (bytes_for_stacks(_BRACKETED.sub(b"", line).strip()),)

    def _join(self, pieces: list[Piece]) -> bytes:
        try:
            return b";".join(pieces[::-1])  # type: ignore[arg-type]
        except TypeError:  # To look first costs much more.
            return b";".join(_with_sources(pieces)[::-1])

    def _sample(self, header: Header, stack: bytes, _line: bytes) -> None:
        task, how = header.comm, self._options
        if how.tid:
            task += b"-%s/%s" % (header.pid or b"?", header.tid)
        elif how.pid:
            task += b"-" + (header.pid or b"?")
        self.sums.counts.count(header.event, (task, stack), 1 if how.samples else header.period)

    def _outside(self, line: bytes) -> None:
        self.sums.unparsed += text.is_junk(line)


def _with_sources(pieces: list[Piece]) -> list[bytes]:
    """Frames, each with the source that stands behind it."""
    frames: list[bytes] = []
    is_awaited = False
    for piece in pieces:
        if isinstance(piece, bytes):
            frames.append(piece)
        elif is_awaited and piece is not None and piece[0]:
            frames[-1] += b":" + piece[0]
        is_awaited = isinstance(piece, bytes)
    return frames
