"""How the handler starts: inside a perf that embeds Python, or as a program of its own.

perf once embedded Python and called a script's functions. It now starts scripts as
programs. Such a program reads what ``perf script`` prints of the samples.
"""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
import threading

from ksym_plugin.kernel.clocks import clock_of_attr
from ksym_plugin.perf import data, session
from ksym_plugin.perf.handler import Handler, Options, parse
from ksym_plugin.perf.output import give_up_output, say
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.repaint import Renamer
    from ksym_plugin.perf.session import Session

#: Built into perf's own interpreter and no other.
_PERF_MODULE = "perf_trace_context"
_PIECE = 1 << 20
#: perf's name for standard input, and Linux' for a file there.
_STDIN = "-"
_STDIN_FILE = "/dev/stdin"
#: A shell's exit status of a program that a signal ended is this and the signal's number.
_SIGNALLED = 128


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be.

    Where there is no perf around it, it is a program: that runs, and exits at its end.
    """
    is_embedded = _PERF_MODULE in sys.builtin_module_names
    options = parse(arguments, is_embedded)
    _prepare()
    try:
        if is_embedded:
            return Handler(options, data.path_of_running_perf())
        sys.exit(run(options))
    except KsymError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted: what is printed is incomplete")
        sys.exit(_SIGNALLED + signal.SIGINT)


def _prepare() -> None:
    """Set up the interpreter, which does nothing but handle samples."""
    # Every sample is a tree of dicts without cycles: looking for some costs a twentieth.
    gc.disable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    if sys.stdout is None:  # closed by whoever started perf
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]


def run(options: Options) -> int:
    """Print what perf script prints, its kernel frames named; the exit status, perf's if it ran.

    Of the perf.data that is named or comes on standard input; its text may come there too.
    KsymError if there is nothing to read, or it cannot be read.
    """
    if options.lines or options.vmlinux is not None:
        raise KsymError("text gets no source lines", "run: ksym script --lines")
    path, start = _input(options.input)
    if path is None and not start:
        say("this is a script for perf; run: perf script -s ksym_handler.py, or: ksym script")
        return 1
    recorded = data.read(path)
    if path == _STDIN:
        start, recorded = _read_header(start)
    with session.open_session(options.choice, path, recorded, options.clock) as known:
        renamer = _renamer(known, options.clock, recorded)
        if path is None:
            return int(not _print_named(_pieces(sys.stdin.buffer, start), options, known, renamer))
        return _run_perf(path, start, options, known, renamer)


def _input(path: str | None) -> tuple[str | None, bytes]:
    """The perf.data to read, None for text on standard input; and what was read of that already."""
    if path not in (None, _STDIN):
        return path, b""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # It is closed.
        mode = 0
    if stat.S_ISREG(mode) and os.pread(0, len(data.MAGIC), 0) == data.MAGIC:
        return _STDIN_FILE, b""
    if path == _STDIN or stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
        start = os.read(0, _PIECE)
        return (_STDIN if start.startswith(data.MAGIC) else None), start
    return ("perf.data" if os.path.exists("perf.data") else None), b""


def _read_header(start: bytes) -> tuple[bytes, Recorded]:
    """All that was read of a piped perf.data to know its events, and what that tells.

    perf record writes those at once, but in several pieces.
    """
    recorded = data.read_start(start)
    while not recorded.attrs and len(start) < _PIECE:
        piece = os.read(0, _PIECE)
        if not piece:
            break
        start += piece
        recorded = data.read_start(start)
    return start, recorded


def _renamer(known: Session, clock: str | None, recorded: Recorded) -> Renamer:
    """What names the frames. KsymError if their times are on several clocks, or on an odd one."""
    clocks = {clock or clock_of_attr(attr) for attr in recorded.attrs.values()} or {clock}
    if known.lookup is not None and recorded.attrs and (len(clocks) > 1 or None in clocks):
        raise KsymError(
            "the samples are on several clocks, or on one that a history cannot place",
            "record with: perf record -k CLOCK_MONOTONIC",
        )
    return known.renamer(clocks.pop(), known.kallsyms)


def _run_perf(path: str, start: bytes, options: Options, known: Session, renamer: Renamer) -> int:
    """Print what perf script prints of a perf.data; its exit status, or 1 if ours failed.

    ``start`` is what was read of it on standard input.
    """
    import subprocess

    call = ["perf", "script", "--ns", "-i", path]
    try:
        perf = subprocess.Popen(
            call, stdin=subprocess.PIPE if start else None, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise KsymError(f"perf cannot be run ({error.strerror})", "install it") from error
    with perf:
        if perf.stdin is not None:
            threading.Thread(target=_feed, args=(perf.stdin, start), daemon=True).start()
        is_whole = _print_named(_pieces(perf.stdout), options, known, renamer)
    status = perf.returncode
    if status < 0 and is_whole:
        say(f"perf was ended by {signal.Signals(-status).name}: its output may be cut short")
        status = _SIGNALLED - status
    return status if is_whole else 1


def _feed(stdin: IO[bytes], start: bytes) -> None:
    """Hand on what comes on standard input, until perf has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        with stdin:
            for piece in _pieces(sys.stdin.buffer, start):
                stdin.write(piece)
                stdin.flush()
    except (OSError, ValueError, KsymError):
        pass  # perf says what is wrong with what it got.


def _print_named(
    pieces: Iterable[bytes], options: Options, known: Session, renamer: Renamer
) -> bool:
    """Print the text, and what became of its frames; whether it could be written."""
    is_whole = True
    try:
        _print(pieces, options, known, renamer)
        sys.stdout.flush()
    except OSError as error:
        give_up_output(error)
        is_whole = False
    finally:
        for line in renamer.report():
            say(line)
    return is_whole


def _print(pieces: Iterable[bytes], options: Options, known: Session, renamer: Renamer) -> None:
    out = sys.stdout.buffer
    if options.format == "text":
        from ksym_plugin.perf.repaint import Annotator

        annotator = Annotator(renamer)
        for piece in pieces:
            out.write(annotator.feed(piece))
            out.flush()
        out.write(annotator.close())
        return
    from ksym_plugin.perf.stack_output import TextStacks, open_output

    output = open_output(options.format, sys.stdout, "perf script", options.event, options.weight)
    reader = TextStacks(renamer, output, Locator(known.lines) if options.wants_lines else None)
    for piece in pieces:
        reader.read(piece)
    reader.end()


def _pieces(stream: IO[bytes] | None, start: bytes = b"") -> Iterator[bytes]:
    """A stream in pieces, each as soon as it is there; ``start`` was read of it before."""
    if start:
        yield start
    try:
        while stream is not None and (piece := os.read(stream.fileno(), _PIECE)):
            yield piece
    except OSError as error:
        raise KsymError(f"the text cannot be read ({error.strerror})") from error
