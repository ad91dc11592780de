"""``ksym fold``: perf script text to folded stacks."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from typing import IO, Optional

import click

from ksym_plugin.cli import options
from ksym_plugin.cli.inputs import read_all
from ksym_plugin.cli.output import plural, say
from ksym_plugin.history.locate import Choice
from ksym_plugin.kernel.worker import Connection, Worker
from ksym_plugin.perf import text as grammar
from ksym_plugin.perf.fold import Folder, FoldOptions
from ksym_plugin.perf.repaint import Renamer
from ksym_plugin.perf.text_origin import Text, open_renamer
from ksym_plugin.timeline.errors import KsymError

Range = tuple[int, int]
#: ``--history`` and ``--clock``.
Naming = tuple[Choice, Optional[str]]

_CHUNK = 1 << 20
#: A smaller part is not worth a process.
_SMALLEST = 4 << 20
#: A blank line, and the line behind it.
_BLANK = re.compile(rb"(?<=\n)\n(?=(.*\n))")


def ranges_of(path: str, number: int) -> list[Range]:
    """Up to ``number`` ranges of a file, each beginning with a sample; none of anything else."""
    if number < 2 or not os.path.isfile(path):
        return []
    size = os.path.getsize(path)
    number = min(number, size // _SMALLEST)
    with open(path, "rb") as file:
        cuts = {_sample_after(file, at * size // number, size) for at in range(1, number)}
    ends = sorted({0, *cuts, size})
    return list(zip(ends, ends[1:]))


def _sample_after(file: IO[bytes], at: int, size: int) -> int:
    """Where the first sample begins that has a blank line before it; the end if none is near."""
    file.seek(at)
    for blank in _BLANK.finditer(file.read(_CHUNK)):
        if grammar.header(blank[1]) is not None:
            return at + blank.end()
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
            serve = functools.partial(_fold_part, how, path, part, naming)
            workers.append(Worker(serve, is_forked=True))
            stack.callback(workers[-1].close)
        for worker in workers:
            try:
                sums, tally, problem = worker.receive()
            except EOFError:
                raise KsymError(
                    "a process that folded a part of the text was killed", "take fewer --jobs"
                ) from None
            folder.sums.add(sums)
            if renamer is not None:
                if tally is None:
                    raise KsymError("the history went away while the text was read", "try again")
                renamer.tally.add(tally)
                renamer.namer.problem = renamer.namer.problem or problem


def _fold_part(how: FoldOptions, path: str, part: Range, naming: Naming, owner: Connection) -> None:
    """Send the part's stacks, its tally, and why the running system was not asked."""
    begin, end = part
    # What there is to say the first process has said already.
    with open(path, "rb") as file, open_renamer(Text(file), *naming, lambda _: None) as renamer:
        folder = Folder(how, renamer)
        file.seek(begin)
        while chunk := file.read(min(_CHUNK, end - begin)):
            begin += len(chunk)
            folder.read(chunk)
        folder.end()
        told = (None, "") if renamer is None else (renamer.tally, renamer.namer.problem)
        owner.send((folder.sums, *told))


@click.command(
    name="fold",
    short_help="Fold perf script text for flame graphs.",
    epilog="Example: ksym fold --all perf.txt | flamegraph.pl > flames.svg",
)
@options.history
@options.text_clock
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
    samples = weight == "samples"
    how = FoldOptions(kernel=kernel or every, jit=jit or every, samples=samples, **flags)
    with click.open_file(file, "rb") as stream:
        text = Text(stream)
        with open_renamer(text, history, clock) as renamer:
            folder = Folder(how, renamer)
            ranges = ranges_of(file, jobs)
            if len(ranges) > 1:
                fold(folder, how, file, ranges, (history, clock), renamer)
            else:
                read_all(folder, text.pieces())
            report = renamer.report() if renamer is not None else []
    counts = folder.sums.counts
    chosen = counts.choose(event.encode("utf-8", "surrogateescape") if event else None)
    sys.stdout.buffer.writelines(folder.sums.lines(chosen))
    sys.stdout.buffer.flush()
    say(*report)
    if chosen is not None and counts.others(chosen):
        say(counts.others(chosen))
    if folder.sums.unparsed:
        say(f"{plural(folder.sums.unparsed, 'line')} neither header nor frame, left out")
