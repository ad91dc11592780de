"""``ksym annotate``: perf script text with its kernel frames repaired."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import say, write_pieces
from ksym_plugin.history.locate import Choice
from ksym_plugin.perf.repaint import Annotator, Renamer
from ksym_plugin.perf.repair import Repairer
from ksym_plugin.perf.session import open_history
from ksym_plugin.perf.text import Cutter
from ksym_plugin.perf.text_origin import Text, open_text


@click.command(
    name="annotate",
    short_help="Repair perf script text, or folded stacks.",
    epilog="Example: ksym annotate perf.txt | stackcollapse-perf.pl > folded.txt",
)
@options.history
@options.text_clock
@click.option("--folded", is_flag=True, help="The text is folded stacks that hold addresses.")
@options.at
@click.argument("file", default="-")
def command(history: Choice, clock: str | None, folded: bool, at: int | None, file: str) -> None:
    """Print perf script's text, from FILE or stdin, with every kernel frame named as it was.

    What is not a kernel frame passes byte for byte, as it comes. perf cuts its times off
    after the microsecond (see perf script --ns): where two programs followed each other
    within it, perf's name stays and is marked with a question mark. The text must be of
    the boot that the history is of; without a history, of the running system, and then
    perf's names have to show it.

    Folded stacks have no time: --at gives one, on perf's clock unless --clock names another,
    and without it an address is named if the history knows of one program only that was ever
    there.
    """
    if at is not None and not folded:
        raise click.UsageError("--at is for --folded: samples have times of their own")
    with click.open_file(file, "rb") as stream:
        if folded:
            _repair(Text(stream), history, at, clock)
        else:
            _annotate(Text(stream), history, clock)


def _annotate(text: Text, history: Choice, clock: str | None) -> None:
    with open_text(text, history, clock) as (_, renamer):
        annotator = Annotator(renamer)
        try:
            write_pieces(map(annotator.feed, text.pieces()), sys.stdout.buffer)
            write_pieces([annotator.close()], sys.stdout.buffer)
        except KeyboardInterrupt:  # This is how an endless text ends.
            _say_tally(renamer)
            raise
        _say_tally(renamer)


def _say_tally(renamer: Renamer) -> None:
    say(*renamer.report())
    if renamer.tally.unparsed and not renamer.tally.frames:
        say("nothing was repaired; if this is folded stacks, say --folded")


def _repair(text: Text, history: Choice, at: int | None, clock: str | None) -> None:
    with open_history(history) as session:
        if session.history is None:
            raise inputs.no_history()
        time_ns = None if at is None else session.time(at, clock)
        statics = inputs.kallsyms() if session.is_this_boot else None
        repairer = Repairer(session.history, statics, time_ns)
        write_pieces(_repaired(text, repairer), sys.stdout.buffer)
        say(*repairer.tally())


def _repaired(text: Text, repairer: Repairer) -> Iterator[bytes]:
    cutter = Cutter()
    for piece in text.pieces():
        before, whole, after = cutter.cut(piece)
        if whole:
            whole = b"\n".join(map(repairer.line, whole[:-1].split(b"\n"))) + b"\n"
        yield before + whole + after
    yield repairer.line(cutter.rest())
