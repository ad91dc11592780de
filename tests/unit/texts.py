"""perf script text for tests, and a history small enough to be seen through."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.perf.fold import Folder, FoldOptions
from ksym_plugin.perf.repaint import Annotator, Renamer
from ksym_plugin.timeline.symbols import SourceLocation
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import load, timeline_of, unload

#: Texts in perf script's many forms, written for these tests.
CORPUS = Path(__file__).parents[1] / "data" / "perf-script"
#: A folder with checkouts of brendangregg/FlameGraph and jonhoo/inferno, and what
#: test_consumers.py names.
REFERENCE = os.environ.get("KSYM_REFERENCE", "")

TABLE = b"ffffffff81000000 T _text\nffffffff81000400 T alpha\nffffffff81000500 T beta\n"
TABLE += b"ffffffff82000000 T _etext\n"
A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
#: One place that A has from 5.000000100 s on and B from 6.000000500 s on.
PLACE = 0xFFFFFFFFC0001000
SECOND = 1_000_000_000


def one_place() -> Timeline:
    return timeline_of(
        load(PLACE, 64, A, 5 * SECOND + 100),
        unload(PLACE, 6 * SECOND + 200),
        load(PLACE, 64, B, 6 * SECOND + 500),
    )


def statics(table: bytes = TABLE) -> Kallsyms:
    return Kallsyms.parse(table)


def renamer(past: Timeline | None = None, table: bytes | None = None) -> Renamer:
    """By a past, and by a table of the running system that needs no proof."""
    running = None if table is None else lambda: (None, statics(table))
    return Renamer(past if past is not None else Timeline(), None, None, running)


def annotated(text: bytes, by: Renamer | None = None, piece: int = 1 << 20) -> bytes:
    annotator = Annotator(by if by is not None else renamer())
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    return b"".join([*map(annotator.feed, pieces), annotator.close()])


def folder_of(
    text: bytes, by: Renamer | None = None, piece: int = 1 << 20, **how: object
) -> Folder:
    folder = Folder(FoldOptions(**how), by)  # type: ignore[arg-type]
    for at in range(0, len(text), piece):
        folder.read(text[at : at + piece])
    folder.end()
    return folder


def folded(
    text: bytes, by: Renamer | None = None, event: bytes | None = None, **how: object
) -> dict[str, int]:
    """Of an event, by default the one with most samples."""
    sums = folder_of(text, by, **how).sums
    counts = sums.folded(sums.counts.choose(event))
    return {stack.decode("utf-8", "surrogateescape"): count for stack, count in counts.items()}


class Lines:
    """Source lines that tell which byte was asked for; of the kernel's image and of BPF."""

    def line(self, place: object, offset: int | None = None) -> SourceLocation:
        return SourceLocation(
            "/src/a b.c", int(str(place), 10) % 4096 if offset is None else offset
        )

    def program_name(self, _: object) -> None:
        return None

    def traced(self, _: object) -> str:
        return "tcp_sendmsg"


def corpus() -> list:
    """The texts of the corpus, as parameters."""
    return [pytest.param(path, id=path.stem) for path in sorted(CORPUS.glob("*.txt"))]
