"""``ksym fold``: perf script text to folded stacks."""

from __future__ import annotations

import sys

import click

from ksym_plugin.cli import options, parts, texts
from ksym_plugin.cli.output import plural, say
from ksym_plugin.perf.fold import Folder, Options, Style
from ksym_plugin.perf.repaint import text_of

_MOST_NAMED = 10


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
@click.option(
    "--event-filter",
    "event",
    metavar="EVENT",
    help="Count this event only.  [default: the first that comes]",
)
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
    history: str | None,
    clock: str | None,
    pid: bool,
    tid: bool,
    kernel: bool,
    bpf: bool,
    jit: bool,
    every: bool,
    addrs: bool,
    event: str | None,
    inline: bool,
    context: bool,
    srcline: bool,
    jobs: int,
    file: str,
) -> None:
    """Fold perf script's text, from FILE or stdin: one line a stack, with its count.

    The options are those of stackcollapse-perf.pl. Where there is a history, kernel
    frames are repaired first, as by ksym annotate, whose output is taken as well.
    """
    how = Options(
        Style(kernel or every, jit or every, addrs, bpf),
        pid,
        tid,
        event.encode("utf-8", "surrogateescape") if event else None,
        srcline,
        inline,
        context,
    )
    with texts.opened(file) as text, texts.renamer(text, history, clock) as renamer:
        folder = Folder(how, renamer)
        ranges = parts.ranges(file, jobs)
        if len(ranges) > 1:
            parts.fold(folder, how, file, ranges, (history, clock), renamer)
        else:
            for piece in text.pieces():
                folder.feed(piece)
            folder.close()
        report = renamer.report() if renamer is not None else []
    stream = sys.stdout.buffer
    stream.writelines(folder.sums.lines())
    stream.flush()
    for line in [*report, *_remarks(folder)]:
        say(line)


def _remarks(folder: Folder) -> list[str]:
    """What was not counted."""
    sums, remarks = folder.sums, []
    if sums.passed_over and folder.event is not None:
        others = ", ".join(
            f"{text_of(event)} ({plural(count, 'sample')})"
            for event, count in sorted(sums.passed_over.items())[:_MOST_NAMED]
        )
        remarks.append(
            f"only {text_of(folder.event)} is counted; --event-filter takes another: {others}"
        )
    if sums.unparsed:
        remarks.append(f"{plural(sums.unparsed, 'line')} neither header nor frame, left out")
    return remarks
