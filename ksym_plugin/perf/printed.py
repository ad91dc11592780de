"""The handler as a program, where perf has no Python module: over what perf script prints."""

from __future__ import annotations

import os
import stat
import sys

from ksym_plugin.perf.handler import Handler
from ksym_plugin.perf.output import give_up_output, say
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Final

    from ksym_plugin.perf.options import Options
    from ksym_plugin.perf.renaming import Renamer

_PIECE: Final = 1 << 20


def is_fed() -> bool:
    """Whether standard input holds something: a pipe, or a file."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def run(options: Options) -> int:
    """The exit status. KsymError if there is no text, or it cannot be read."""
    if options.input is None and not is_fed():
        say("this is a script for perf; run: perf script -s ksym_handler.py, or: ksym script")
        return 1
    if options.format == "report":
        raise KsymError("text is not enough for a report", "run: ksym report")
    if options.lines or options.vmlinux is not None:
        raise KsymError("text gets no source lines", "run: ksym script --lines")
    handler = Handler(options, options.input)
    try:
        return _renamed(options, handler.renamer())
    finally:
        handler.close()


def _renamed(options: Options, renamer: Renamer) -> int:
    try:
        if options.input is None:
            _print(sys.stdin.buffer, options.format, renamer)
            status = 0
        else:
            status = _print_file(options.input, options.format, renamer)
        sys.stdout.flush()
    except OSError as error:
        give_up_output(error)
        status = 1
    for line in renamer.report():
        say(line)
    return status


def _print_file(path: str, form: str, renamer: Renamer) -> int:
    """What perf script prints of a perf.data; its exit status."""
    import subprocess

    call = ["perf", "script", "--ns", "-i", path]
    try:
        child = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise KsymError(f"perf cannot be run ({error.strerror})", "install it") from error
    with child:
        if child.stdout is not None:
            _print(child.stdout, form, renamer)
    return child.returncode


def _print(stream: IO[bytes], form: str, renamer: Renamer) -> None:
    out = sys.stdout.buffer
    if form == "text":
        from ksym_plugin.perf.annotate import Annotator

        annotator = Annotator(renamer)
        for piece in _pieces(stream):
            out.write(annotator.feed(piece))
            out.flush()
        out.write(annotator.close())
        return
    from ksym_plugin.stacks import fold, folded, speedscope, svg
    from ksym_plugin.stacks.spelling import Style

    folder = fold.Folder(fold.Options(Style(kernel=True, bpf=form != "folded")), renamer)
    for piece in _pieces(stream):
        folder.feed(piece)
    folder.close()
    if form == "folded":
        out.writelines(folder.sums.lines())
        return
    counts = folded.parse(folder.sums.lines()).counts
    if form == "svg":
        sys.stdout.writelines(svg.draw(counts, svg.Picture("perf script")))
    else:
        sys.stdout.writelines(speedscope.write("perf script", [("all", sorted(counts.items()))]))


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """What there is, as soon as it is there."""
    while piece := _read(stream.fileno()):
        yield piece


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _PIECE)
    except OSError as error:
        raise KsymError(f"the text cannot be read ({error.strerror})") from error
