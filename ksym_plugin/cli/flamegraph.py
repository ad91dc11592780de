"""``ksym flamegraph``: folded stacks from anywhere, drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO

import click

from ksym_plugin.cli import options
from ksym_plugin.cli.output import plural, say, write_text
from ksym_plugin.stacks import flamegraph, folded, speedscope
from ksym_plugin.stacks.frames import Stacks
from ksym_plugin.timeline.errors import KsymError

#: A longer line holds no stack. A file without line ends must not fill the memory.
_LONGEST = 1 << 24


@click.command(
    name="flamegraph",
    short_help="Draw folded stacks from anywhere.",
    epilog="Example: ksym flamegraph stacks.folded > flames.svg",
)
@options.output
@click.option(
    "--format",
    "form",
    type=click.Choice(["svg", "speedscope"]),
    default="svg",
    show_default=True,
    help="A picture with all it needs inside, or a file for speedscope.",
)
@click.option("--title", metavar="TEXT", help="What stands above it.  [default: the file's name]")
@click.option(
    "--width",
    type=click.IntRange(200, 20_000),
    metavar="PIXELS",
    help="A fixed width.  [default: as wide as the window]",
)
@click.option(
    "--min-width",
    type=click.FloatRange(0),
    default=flamegraph.LEAST,
    show_default=True,
    metavar="PIXELS",
    help="Narrower frames are left out.",
)
@click.option("--inverted", is_flag=True, help="Callers on top: an icicle graph.")
@click.argument("file", default="-")
def command(
    output: str | None,
    form: str,
    title: str | None,
    width: int | None,
    min_width: float,
    inverted: bool,
    file: str,
) -> None:
    """Draw folded stacks: lines of root;...;leaf and a count, from FILE or stdin.

    Frames ending in _[k], _[b], _[j], _[i] are the kernel's, BPF, compiled at run time, or
    inlined; BPF programs are known by their names too. Where every line has two counts,
    the second is drawn.
    """
    stacks = read(file)
    title = title or ("Flame graph" if file == "-" else os.path.basename(file))
    if form == "svg":
        pieces = flamegraph.draw(stacks, title, width=width, least=min_width, inverted=inverted)
    else:
        pieces = speedscope.write(title, stacks.table, [("all", stacks.ordered())])
    write_text(pieces, output)


def read(file: str) -> Stacks:
    """The stacks in a file or on stdin; KsymError if there are none."""
    with click.open_file(file, "rb") as stream:
        stacks = folded.parse(_lines(stream))
    if not stacks.counts:
        where = "stdin" if file == "-" else file
        raise KsymError(f"{where} holds no folded stacks", "make some with: ksym fold")
    if stacks.skipped:
        say(f"{plural(stacks.skipped, 'line')} without a stack and a count left out")
    return stacks


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a text; one that is too long is replaced by one without a stack."""
    is_start = True
    while line := stream.readline(_LONGEST):
        has_ended = line.endswith(b"\n") or len(line) < _LONGEST
        if is_start:
            yield line if has_ended else b"-"
        is_start = has_ended
