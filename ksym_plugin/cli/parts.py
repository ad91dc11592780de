"""A big text folded in parts, a process each."""

from __future__ import annotations

import os

from ksym_plugin.cli import texts
from ksym_plugin.perf import text as grammar
from ksym_plugin.stacks.fold import Folder, Options, Sums

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Final, Optional

    from ksym_plugin.perf.text_tally import TextTally

    Range = tuple[int, int]
    #: ``--history`` and ``--clock``.
    Naming = tuple[Optional[str], Optional[str]]

_CHUNK: Final = 1 << 20
#: A smaller part is not worth a process.
_SMALLEST: Final = 4 << 20
_BLANK: Final = b"\n\n"


def ranges(path: str, number: int) -> list[Range]:
    """Up to ``number`` ranges of a file, each beginning with a sample; one for anything else."""
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
    how: Options,
    path: str,
    pieces: list[Range],
    naming: Naming,
    total: TextTally | None,
) -> None:
    """Fold the parts of a file into ``folder``, and their tallies into ``total``."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    if how.event is None:  # The first of the whole text, not of each part.
        how.event = folder.event = _first_event(path)
    # What a part needs is read from the file there: nothing open is shared.
    with ProcessPoolExecutor(len(pieces), get_context("fork")) as pool:
        parts = [pool.submit(_fold_part, how, path, piece, naming) for piece in pieces]
        for part in parts:
            folded, tally = part.result()
            folder.sums.add(folded)
            if tally is not None and total is not None:
                total.add(tally)


def _first_event(path: str) -> bytes | None:
    probe = Folder(Options())
    with open(path, "rb") as file:
        chunk = file.read(_CHUNK)
        while chunk and probe.event is None:
            probe.feed(chunk)
            chunk = file.read(_CHUNK)
    return probe.event


def _fold_part(
    how: Options, path: str, piece: Range, naming: Naming
) -> tuple[Sums, TextTally | None]:
    begin, end = piece
    with texts.opened(path) as text, texts.renamer(text, *naming, tell=_keep_quiet) as renamer:
        folder = Folder(how, renamer)
        with open(path, "rb") as file:
            file.seek(begin)
            while begin < end:
                chunk = file.read(min(_CHUNK, end - begin))
                if not chunk:
                    break
                begin += len(chunk)
                folder.feed(chunk)
        folder.close()
        return folder.sums, renamer.tally if renamer is not None else None


def _keep_quiet(_: str) -> None:
    """What the first process has said already."""
