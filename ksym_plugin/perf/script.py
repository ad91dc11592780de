"""``perf script`` as a child: what it is asked for, and what is done to its text.

A repair needs each sample's time in full, and the address, name and file of each frame. perf
is asked for these; what the user did not ask for is taken out again. Options that work on
perf's own names (``-S``, ``--stop-bt``) are not given to perf: they are done here, on the names
that are printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import subprocess
import threading

from ksym_plugin.kernel.clocks import clock_of_attr
from ksym_plugin.perf import data, text
from ksym_plugin.perf.output import say
from ksym_plugin.perf.repaint import Annotator
from ksym_plugin.stacks.frames import Counts
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.repaint import Renamer
    from ksym_plugin.perf.session import Session
    from ksym_plugin.timeline.resolver import Locator

#: Options of perf script that are looked at, with the least of the name that tells perf which
#: is meant (tools/lib/subcmd/parse-options.c): those with a value, and those without.
_WITH_VALUE = {"fields": "fi", "symbols": "symb", "stop-bt": "sto"}
_ALONE = {"ns": "ns", "reltime": "rel", "deltatime": "delt"}
_REFUSED = {
    "script": ("sc", "it runs no other script", "run: perf script -s SCRIPT"),
    "gen-script": ("ge", "it writes no script", "run: perf script -g LANGUAGE"),
    "per-event-dump": (
        "per-e",
        "what perf writes into files of its own is not repaired",
        "take one event after the other: --event NAME -o FILE",
    ),
}
_LONG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?", re.DOTALL)
#: Short options without a value can stand before one with a value: ``-fF ip,sym``.
WITHOUT_VALUE = "[aDdfGILlv]"
_SHORT = re.compile(f"-({WITHOUT_VALUE}*)([FSsg])(.*)", re.DOTALL)
_LETTERS = {"F": "fields", "S": "symbols", "s": "script", "g": "gen-script"}
_FIELDS_TYPE = re.compile(r"(?:hw|sw|trace|raw|synth|break|bpf-output)\d*:")
#: perf script leaves out where samples of tracepoints were, and has much else to say of them.
STACKS = ("-F", "trace:+ip,+sym,+symoff,+dso,-trace")
#: What a repair needs beside the address and the name.
_NEEDED = ("time", "dso")
_SECOND = 1_000_000_000
#: perf prints seconds in at least so many columns, and digits after them without --ns.
_SECONDS_WIDTH = 5
_DIGITS = 9
_LONGEST_SECONDS = 12
_DOT = ord(".")
_PIECE = 1 << 20
#: F_SETPIPE_SZ of linux/fcntl.h. perf need not wait then for each piece to be read.
_SET_PIPE_SIZE = 1031
#: perf's name for standard input, and Linux' for a file there.
_STDIN = "-"
_STDIN_FILE = "/dev/stdin"
#: A shell's exit status of a program that a signal ended is this and the signal's number.
_SIGNALLED = 128


class Request:
    """A user's options of perf script, parted.

    ``options`` are for perf. ``hidden`` are the fields that it is asked for and that are taken
    out again. ``has_offsets`` says that offsets in functions are printed. KsymError for what
    cannot be done.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self.options: list[str] = []
        self.hidden: frozenset[str] = frozenset()
        self.has_offsets = True
        self.symbols: frozenset[bytes] = frozenset()
        self.stops: frozenset[bytes] = frozenset()
        self._alone: set[str] = set()
        self._fields: list[str] = []
        self._parse(list(options))
        self._choose_fields()
        self.options.append("--ns")

    def refuse_for_stacks(self) -> None:
        """KsymError if there is an option that counts of stacks have no use for."""
        is_of_text = {
            "-F": self._fields,
            "-S": self.symbols,
            "--stop-bt": self.stops,
            "--reltime": "reltime" in self._alone,
            "--deltatime": "deltatime" in self._alone,
        }
        for option in (name for name, value in is_of_text.items() if value):
            raise KsymError(f"{option} is for the text alone", "leave it out, or --format")

    @property
    def times(self) -> Times:
        """What makes the times of a text what was asked for."""
        mode = self._alone & {"reltime", "deltatime"}
        return Times("ns" in self._alone, "time" in self.hidden, min(mode, default=""))

    def _parse(self, words: list[str]) -> None:
        if words and not words[0].startswith("-"):
            raise KsymError(f"'{words[0]}' is no option of perf script", "name a perf.data with -i")
        while words:
            word = words.pop(0)
            name, value = self._known(word)
            if name in _REFUSED:
                raise KsymError(
                    f"ksym script does not take {word}: {_REFUSED[name][1]}", _REFUSED[name][2]
                )
            if name in _WITH_VALUE:
                if value is None and not words:
                    raise KsymError(f"{word} needs a value", "see: perf script -h")
                self._take(name, words.pop(0) if value is None else value)
            elif name in _ALONE:
                self._alone.add(name)
            else:
                self.options.append(word)

    def _known(self, word: str) -> tuple[str, str | None]:
        """The option that a word is, in full, and the value in it; empty for any other."""
        found = _SHORT.fullmatch(word)
        if found is not None:
            self.options += [f"-{found[1]}"] if found[1] else []
            return _LETTERS[found[2]], found[3] or None
        found = _LONG.fullmatch(word)
        if found is None:
            return "", None
        least = {**_WITH_VALUE, **_ALONE, **{name: how[0] for name, how in _REFUSED.items()}}
        for name, start in least.items():
            if name.startswith(found[1]) and found[1].startswith(start):
                return name, found[2]
        return "", None

    def _take(self, name: str, value: str) -> None:
        if name == "fields":
            self._fields.append(value)
            return
        names = frozenset(os.fsencode(part) for part in value.split(",") if part)
        if name == "symbols":
            self.symbols |= names
        else:
            self.stops |= names

    # What is printed of a sample

    def _choose_fields(self) -> None:
        """Give perf the fields asked for and those needed; KsymError if they differ by type."""
        hidden = {frozenset(self._add_fields(value)) for value in self._fields}
        if len(hidden) > 1:
            raise KsymError(
                "-F asks for the time or the file of some kinds of events only",
                "name time and dso for all of them",
            )
        self.hidden = hidden.pop() if hidden else frozenset()
        looked_for = self.symbols or self.stops
        if looked_for and not self._prints("ip", "sym"):
            raise KsymError(
                "-S and --stop-bt look for names that -F leaves out", "add ip,sym to -F"
            )

    def refuse_event(self, event: str | None) -> None:
        """KsymError if samples are to be chosen by their event, which is not printed."""
        if event is not None and not self._prints("event"):
            raise KsymError("--event looks for what -F leaves out", "add event to -F")

    def _prints(self, *fields: str) -> bool:
        """Whether these are printed of all kinds of events."""
        for value in self._fields:
            chosen = _FIELDS_TYPE.sub("", value, count=1).split(",")
            changes = any(field[:1] in ("+", "-") for field in chosen)
            if any(f"-{field}" in chosen or not (changes or field in chosen) for field in fields):
                return False
        return True

    def _add_fields(self, value: str) -> list[str]:
        """The fields that are missing in the value of a -F, which perf is given with them."""
        kind = _FIELDS_TYPE.match(value)
        prefix = "" if kind is None else kind[0]
        fields = value[len(prefix) :].split(",")
        if any(field[:1] in ("+", "-") for field in fields):
            missing = [field for field in _NEEDED if f"-{field}" in fields]
            self.has_offsets = self.has_offsets and "-symoff" not in fields
            # Any change of fields makes perf print others of tracepoints: it has to see one.
            fields = [f"+{field[1:]}" if field[1:] in missing else field for field in fields]
        else:
            is_named = {"ip", "sym"} <= set(fields)
            missing = [field for field in _NEEDED if is_named and field not in fields]
            self.has_offsets = self.has_offsets and "symoff" in fields
            fields += missing
        self.options += ["-F", prefix + ",".join(fields)]
        return missing


class Times:
    """Makes the times of headers what was asked for: perf printed each with nine digits."""

    def __init__(self, in_full: bool, is_hidden: bool, relative: str) -> None:
        self._in_full = in_full
        self._is_hidden = is_hidden
        self._relative = relative
        self._is_plain = not (in_full or is_hidden or relative)
        self._since: int | None = None

    def format(self, line: bytes, end: int) -> bytes:
        """A line with a time, which ends at ``end``, as it is printed."""
        dot = end - _DIGITS - 1
        # Text that a task or a tracepoint brought may look like a header with another time.
        if dot <= 0 or line[dot] != _DOT or not line[dot + 1 : end].isdigit():
            return line
        if self._is_plain:
            return line[: end - 3] + line[end:]
        start = line.rfind(b" ", 0, dot) + 1
        if not line[start:dot].isdigit() or dot - start > _LONGEST_SECONDS:
            return line
        begin = min(start, dot - _SECONDS_WIDTH)  # perf aligns it.
        if self._is_hidden:
            return line[:begin] + line[end + 2 :]
        shown = line[begin:end]
        if self._relative:
            shown = self._relatively(int(line[start:dot] + line[dot + 1 : end]))
        return line[:begin] + (shown if self._in_full else shown[:-3]) + line[end:]

    def format_record(self, line: bytes) -> bytes:
        """The same of any line: only a side-band record is changed."""
        record = text.timed(line) if text.RECORD in line else None
        if record is None or record.event != text.RECORD:
            return line
        return self.format(line, len(line) - record.behind)

    def _relatively(self, time: int) -> bytes:
        """As perf does it (perf_sample__fprintf_start in builtin-script.c)."""
        since = time if self._since is None else self._since
        if self._since is None or self._relative == "deltatime":
            self._since = time
        return b"%5d.%09d" % divmod(max(0, time - since), _SECOND)


class Selection:
    """Passes what was asked for of a text that is named already: samples by their event
    (``--event``) or the function they ended in (``-S``), callers up to one (``--stop-bt``).

    ``feed`` takes any piece of the text, ``close`` gives its end.
    """

    def __init__(self, request: Request, event: bytes | None) -> None:
        self._symbols = request.symbols
        self._stops = request.stops
        self._event = event
        #: The events there are.
        self._events: Counts[bytes, bytes] = Counts()
        self._times = request.times
        self._cutter = text.Cutter()
        #: The sample at hand: its header, its lines, and its frames so far.
        self._header: text.Header | None = None
        self._sample: list[bytes] = []
        self._frames: list[text.FrameLine] = []
        self._is_start = True
        self._is_stopped = False

    def feed(self, data: bytes) -> bytes:
        """The text of all samples that have ended."""
        before, whole, after = self._cutter.cut(data)
        return before + b"".join(map(self._line, whole.splitlines(keepends=True))) + after

    def close(self) -> bytes:
        """The rest. KsymError if there are samples, but none of the event."""
        rest = self._line(self._cutter.rest()) + self._end()
        self._events.choose(self._event)
        return rest

    def _line(self, line: bytes) -> bytes:
        """Take a line; the text of the sample that has ended before it."""
        ended = b""
        is_blank = not line.strip()
        parsed = None if is_blank else text.parse(line, self._is_start)
        if isinstance(parsed, text.Header):
            ended = self._end()
            self._header = parsed
            frame = text.payload_frame(line, parsed.payload)
            self._frames = [] if frame is None else [frame]
        elif not is_blank and self._is_stopped:
            return b""
        elif isinstance(parsed, text.FrameLine):
            self._frames.append(parsed)
            self._is_stopped = parsed.name in self._stops
        elif not is_blank:
            ended = self._end() if self._is_start else b""
            line = self._times.format_record(line)
        self._sample.append(line)
        self._is_start = is_blank
        return ended

    def _end(self) -> bytes:
        """The text of the sample at hand, which has ended; what is no sample passes."""
        header, sample = self._header, self._sample
        self._header, self._sample, self._is_stopped = None, [], False
        if header is not None:
            if not self._is_wanted(header):
                return b""
            sample[0] = self._times.format(sample[0], len(sample[0]) - header.behind)
        return b"".join(sample)

    def _is_wanted(self, header: text.Header) -> bool:
        if self._event is not None:
            self._events.count(header.event, b"", 1)
            if header.event != self._event:
                return False
        if not self._symbols:
            return True
        if not self._frames:
            return False
        # Functions inlined into the one that perf finds there stand before it.
        leaf = self._frames[0].address
        at_leaf = [frame for frame in self._frames if frame.address == leaf][-1]
        return not self._symbols.isdisjoint(_symbol(at_leaf))


class ScriptText(Annotator):
    """perf script's text with its kernel frames repaired, as a user asked for it.

    ``feed`` takes any piece of perf's text, ``close`` gives the end.
    """

    def __init__(
        self, renamer: Renamer, request: Request, event: str | None, locator: Locator | None = None
    ) -> None:
        super().__init__(renamer, locator)
        is_chosen = event is not None or request.symbols or request.stops
        wanted = None if event is None else os.fsencode(event)
        self._selection = Selection(request, wanted) if is_chosen else None
        self._times = request.times
        if self._selection is None:  # That has the times of what it passes made.
            self._format_header = self._times.format
        self._hides_dso = "dso" in request.hidden
        self.passes_users = not self._hides_dso
        self.has_offsets = request.has_offsets

    def feed(self, data: bytes) -> bytes:
        """The text of all that has ended."""
        passed = super().feed(data)
        return passed if self._selection is None else self._selection.feed(passed)

    def close(self) -> bytes:
        """The rest."""
        rest = super().close()
        if self._selection is None:
            return rest
        return self._selection.feed(rest) + self._selection.close()

    def _line(self, line: bytes) -> bytes:
        if self._selection is None:
            line = self._times.format_record(line)
        return super()._line(line)

    def _user(self, line: bytes, frame: text.FrameLine) -> bytes:
        return text.without_dso(line) if self._hides_dso else line

    def _kernel(
        self, line: bytes, frame: text.FrameLine, decision: Decision, dso: str, is_leaf: bool
    ) -> bytes:
        line = super()._kernel(line, frame, decision, dso, is_leaf)
        if not self._hides_dso:
            return line
        first, end, source = line.partition(b"\n")
        return text.without_dso(first) + end + source


def _symbol(frame: text.FrameLine) -> tuple[bytes, ...]:
    """What -S may call a function: its name, or where it begins."""
    name = frame.name.rstrip(b"?")
    start = frame.address - int(frame.offset or b"0", 16)
    return frame.name, name, b"%x" % start, b"0x%x" % start


class Input:
    """What is read: a perf.data by its ``path``, or perf script's text, which has none.

    ``recorded`` is what its header tells. ``start`` is what was read of standard input to
    find that out; ``pieces`` gives all of it.
    """

    def __init__(self, path: str | None) -> None:
        """Without a ``path``: standard input if something comes there, else ./perf.data."""
        self.start = b""
        self.path: str | None = path
        if path in (None, _STDIN):
            try:
                self._look_at_stdin(path)
            except OSError as error:
                raise _unreadable(error) from error
        self.recorded = data.read(self.path) if self.path != _STDIN else self._read_header()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return self.path is None and not self.start

    def pieces(self) -> Iterator[bytes]:
        """Standard input, each piece as soon as it is there. KsymError if it cannot be read."""
        if self.start:
            yield self.start
        try:
            while piece := os.read(0, _PIECE):
                yield piece
        except OSError as error:
            raise _unreadable(error) from error

    def _look_at_stdin(self, path: str | None) -> None:
        try:
            mode = os.fstat(0).st_mode
        except OSError:  # It is closed.
            mode = 0
        if stat.S_ISREG(mode) and os.pread(0, len(data.MAGIC), 0) == data.MAGIC:
            self.path = _STDIN_FILE
        elif path == _STDIN or stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
            self.start = os.read(0, _PIECE)
            self.path = _STDIN if self.start.startswith(data.MAGIC) else None
        elif os.path.exists("perf.data"):
            self.path = "perf.data"

    def _read_header(self) -> Recorded:
        """perf record writes its events before all samples, but in several pieces."""
        recorded = data.read_start(self.start)
        while not recorded.attrs and len(self.start) < _PIECE:
            piece = os.read(0, _PIECE)
            if not piece:
                break
            self.start += piece
            recorded = data.read_start(self.start)
        return recorded


def _unreadable(error: OSError) -> KsymError:
    return KsymError(f"standard input cannot be read ({error.strerror})")


class Child:
    """A perf script that reads a perf.data; it ends with the ``with`` at the latest."""

    def __init__(self, source: Input, options: Sequence[str] = ("--ns",)) -> None:
        """KsymError if there is no perf."""
        call = ["perf", "script", "-i", str(source.path), *options]
        stdin = subprocess.PIPE if source.start else None
        try:
            self._child = subprocess.Popen(call, stdin=stdin, stdout=subprocess.PIPE)
        except OSError as error:
            raise KsymError(
                f"perf cannot be run ({error.strerror})",
                "install it (Debian: apt install linux-perf)",
            ) from None
        self.stdout = self._child.stdout
        if self.stdout is not None:
            with contextlib.suppress(OSError):  # An ordinary user may have too many pipes.
                fcntl.fcntl(self.stdout, _SET_PIPE_SIZE, _PIECE)
        if self._child.stdin is not None:
            feed = (self._child.stdin, source)
            threading.Thread(target=_feed, args=feed, daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait()
        if self.stdout is not None:
            self.stdout.close()

    def pieces(self) -> Iterator[bytes]:
        """What it prints, each piece as soon as it is there."""
        while self.stdout and (piece := os.read(self.stdout.fileno(), _PIECE)):
            yield piece

    def status(self) -> int:
        """Its exit status as a shell gives it, at its end. A death is said."""
        status = self._child.wait()
        if status >= 0:
            return status
        say(f"perf was ended by {_name_of(-status)}: its output may be cut short")
        return _SIGNALLED - status


def _name_of(number: int) -> str:
    """A signal's name; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _feed(stdin: IO[bytes], source: Input) -> None:
    """Hand on what comes on standard input, until perf has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    # perf says what is wrong with what it got.
    with contextlib.suppress(OSError, ValueError, KsymError), stdin:
        for piece in source.pieces():
            stdin.write(piece)
            stdin.flush()


def clocks(recorded: Recorded, known: Session, clock: str | None) -> str | dict[bytes, str] | None:
    """The clock of the samples, of each event where they differ. What a history cannot place
    is left out, and said: then perf's names of BPF stand."""
    if clock is not None or not recorded.attrs or known.clock_map is None:
        return clock
    found = {event: clock_of_attr(attr) for event, attr in recorded.attrs.items()}
    placed: dict[bytes, str] = {}
    for event, name in found.items():
        if name is not None and known.clock_map.knows(name):
            placed[os.fsencode(event)] = name
        else:
            say(
                f"samples of {event} are on a clock that the history cannot place, so BPF frames"
                " stay as perf has them; record with: perf record -k CLOCK_MONOTONIC"
            )
    # One for all is that of events that perf makes up, too, and of lines that tell none.
    clocks_there = set(placed.values())
    return clocks_there.pop() if len(placed) == len(found) and len(clocks_there) == 1 else placed
