"""How the handler starts: inside a perf that embeds Python, or as a program of its own.

perf once embedded Python and called a script's functions. It now starts scripts as
programs. Such a program reads what ``perf script`` prints of the samples.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from ksym_plugin.perf import data, session
from ksym_plugin.perf.handler import Handler, Options, parse
from ksym_plugin.perf.output import give_up_output, say
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ksym_plugin.perf.repaint import Renamer
    from ksym_plugin.perf.session import Session

#: Built into perf's own interpreter and no other.
_PERF_MODULE = "perf_trace_context"
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
    from ksym_plugin.perf import script

    source = script.Input(options.input)
    if source.is_empty:
        say("this is a script for perf; run: perf script -s ksym_handler.py, or: ksym script")
        return 1
    if source.path is None:
        from ksym_plugin.perf.text_origin import Text, open_text

        text = Text(sys.stdin.buffer, source.start)
        with open_text(text, options.choice, options.clock) as (known, renamer):
            return int(not _print_named(text.pieces(), options, known, renamer))
    with session.open_session(options.choice, source.path, source.recorded, options.clock) as known:
        renamer = known.renamer(script.clocks(source.recorded, known, options.clock))
        fields = () if options.format == "text" else script.STACKS
        with script.Child(source, [*fields, "--ns"]) as perf:
            is_whole = _print_named(perf.pieces(), options, known, renamer)
            return perf.status() if is_whole else 1


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
