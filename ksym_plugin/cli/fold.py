"""``ksym fold``: perf script text to folded stacks."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import plural, say
from ksym_plugin.history.locate import Choice
from ksym_plugin.kernel.worker import Worker
from ksym_plugin.perf import text as grammar
from ksym_plugin.perf.fold import Folder, FoldOptions, Sums
from ksym_plugin.perf.text_origin import open_renamer
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Optional

    from ksym_plugin.kernel.worker import Connection
    from ksym_plugin.perf.namer import Tally
    from ksym_plugin.perf.repaint import Renamer

    Range = tuple[int, int]
    #: ``--history`` and ``--clock``.
    Naming = tuple[Choice, Optional[str]]
    #: A part's stacks, its tally, and why the running system was not asked.
    Folded = tuple[Sums, Optional[Tally], str]

_CHUNK = 1 << 20
#: A smaller part is not worth a process.
_SMALLEST = 4 << 20
_BLANK = b"\n\n"


def ranges_of(path: str, number: int) -> list[Range]:
    """Up to ``number`` ranges of a file, each beginning with a sample; none of anything else."""
    if number < 2 or not os.path.isfile(path):
        return []
    size = os.path.getsize(path)
    number = min(number, size // _SMALLEST)
    cuts = {0, size}
    with open(path, "rb") as file:
        for at in range(1, number):
            cuts.add(_sample_after(file, at * size // number, size))
    ends = sorted(cuts)
    return list(zip(ends, ends[1:]))


def _sample_after(file: IO[bytes], at: int, size: int) -> int:
    """Where the first sample begins that has a blank line before it; the end if none is near."""
    file.seek(at)
    chunk = file.read(_CHUNK)
    blank = chunk.find(_BLANK)
    while blank >= 0:
        begin = blank + len(_BLANK)
        line = chunk[begin : chunk.find(b"\n", begin) + 1]
        if line and grammar.header(line) is not None:
            return at + begin
        blank = chunk.find(_BLANK, blank + 1)
    return size


def fold(
    folder: Folder,
    how: FoldOptions,
    path: str,
    parts: list[Range],
    naming: Naming,
    renamer: Renamer | None,
) -> None:
    """Fold the parts of a file into ``folder``; what to report of them goes to ``renamer``."""
    with contextlib.ExitStack() as stack:
        workers: list[Worker] = []
        for part in parts:
            # What a part needs is read from the file there: nothing open is shared.
            fold_part = functools.partial(_fold_part, how, path, part, naming)
            workers.append(Worker(functools.partial(_send, fold_part), is_forked=True))
            stack.callback(workers[-1].close)
        for worker in workers:
            sums, tally, problem = _result(worker)
            folder.sums.add(sums)
            if renamer is not None and tally is not None:
                renamer.tally.add(tally)
                renamer.namer.problem = renamer.namer.problem or problem


def _send(fold_part: Callable[[], Folded], owner: Connection) -> None:
    owner.send(fold_part())


def _result(worker: Worker) -> Folded:
    """What it has folded; KsymError or OSError if it could not."""
    try:
        folded: Folded = worker.receive()
    except EOFError:
        raise KsymError(
            "a process that folded a part of the text was killed", "take fewer --jobs"
        ) from None
    return folded


def _fold_part(how: FoldOptions, path: str, part: Range, naming: Naming) -> Folded:
    begin, end = part
    with inputs.open_text(path) as text, open_renamer(text, *naming, _say_nothing) as renamer:
        folder = Folder(how, renamer)
        with open(path, "rb") as file:
            file.seek(begin)
            while chunk := file.read(min(_CHUNK, end - begin)):
                begin += len(chunk)
                folder.read(chunk)
        folder.end()
        if renamer is None:
            return folder.sums, None, ""
        return folder.sums, renamer.tally, renamer.namer.problem


def _say_nothing(_: str) -> None:
    """The first process has said it already."""


@click.command(
    name="fold",
    short_help="Fold perf script text for flame graphs.",
    epilog="Example: ksym fold --all perf.txt | flamegraph.pl > flames.svg",
)
@options.history
@options.clock
@click.option("--pid", is_flag=True, help="Tell processes of one name apart.")
@click.option("--tid", is_flag=True, help="Tell threads of one name apart.")
@click.option("--kernel", is_flag=True, help="Mark kernel frames, BPF among them, with _[k].")
@click.option("--bpf", is_flag=True, help="Mark BPF frames with _[b].")
@click.option("--jit", is_flag=True, help="Mark frames compiled at run time with _[j].")
@click.option("--all", "every", is_flag=True, help="Both --kernel and --jit.")
@click.option("--addrs", is_flag=True, help="Keep the addresses of frames without a symbol.")
@options.event
@options.weight("period")
@click.option("--inline", is_flag=True, help="Ask addr2line for inlined functions.")
@click.option("--context", is_flag=True, help="With --inline, source lines too.")
@click.option("--srcline", is_flag=True, help="Take in source lines (perf script -F +srcline).")
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Read a big FILE with N processes.",
)
@click.argument("file", default="-")
def command(
    *,
    history: Choice,
    clock: str | None,
    kernel: bool,
    jit: bool,
    every: bool,
    event: str | None,
    weight: str,
    jobs: int,
    file: str,
    **flags: bool,
) -> None:
    """Fold perf script's text, from FILE or stdin: one line a stack, with its count.

    Most options are those of stackcollapse-perf.pl. Different events are never added up.
    Where there is a history, kernel frames are repaired first, as by ksym annotate, whose
    output is taken as well.
    """
    how = FoldOptions(
        kernel=kernel or every,
        jit=jit or every,
        samples=weight == "samples",
        **flags,
    )
    with inputs.open_text(file) as text, open_renamer(text, history, clock) as renamer:
        folder = Folder(how, renamer)
        ranges = ranges_of(file, jobs)
        if len(ranges) > 1:
            fold(folder, how, file, ranges, (history, clock), renamer)
        else:
            for piece in text.pieces():
                folder.read(piece)
            folder.end()
        report = renamer.report() if renamer is not None else []
    counts = folder.sums.counts
    chosen = counts.choose(event.encode("utf-8", "surrogateescape") if event else None)
    sys.stdout.buffer.writelines(folder.sums.lines(chosen))
    sys.stdout.buffer.flush()
    for line in report:
        say(line)
    if chosen is not None and counts.others(chosen):
        say(counts.others(chosen))
    if folder.sums.unparsed:
        say(f"{plural(folder.sums.unparsed, 'line')} neither header nor frame, left out")
