"""What a history keeps of programs: what they were, their lines, and at what size."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from ksym_plugin.history.reader import BootHistory, History
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.timeline.packed import digest_of
from ksym_plugin.timeline.program import GONE, ProgramDetails, pack_lines
from ksym_plugin.timeline.symbols import Lifetime
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, unload

TAG = "00000000000000aa"
FILE = "/home/builder/src/classifier/classify.bpf.c"


def details(prog_id: int, starts: list[int], rows: int = 14, salt: int = 0) -> ProgramDetails:
    known = ProgramDetails(prog_id, "")
    known.tag, known.type, known.uid, known.load_time = TAG, 3, 1000, 5
    known.functions = [(start, 0x100, f"bpf_prog_{TAG}_f") for start in starts]
    known.lines = pack_lines(
        [
            (at * 4, 10 + at + 100 * number + salt, FILE, f"hash = mix({number}, {at});")
            for at in range(rows)
        ]
        for number in range(len(starts))
    )
    known.digest = digest_of(known.lines)
    return known


class Kept:
    """A history with a writer that tells of programs at addresses 0x1000 apart."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.writer = HistoryWriter(path, "test", 1, None)
        self.timeline = Timeline()

    def load(self, prog_id: int, functions: int, salt: int = 0) -> list[int]:
        starts = [BASE + 0x1000 * prog_id + 0x200 * at for at in range(functions)]
        for start in starts:
            name = f"bpf_prog_{TAG}_f"
            self._apply(load(start, 0x100, name, 10 * prog_id, prog_id))
        self.writer.note_program(details(prog_id, starts, salt=salt))
        return starts

    def unload(self, start: int, prog_id: int) -> None:
        self._apply(unload(start, 10 * prog_id + 5, None, prog_id))

    def _apply(self, change: object) -> None:
        lifetime = self.timeline.apply(change)  # type: ignore[arg-type]
        assert lifetime is not None
        self.writer.note(lifetime)


def past_of(history: History) -> BootHistory:
    return history.recorded(history.boots()[-1])


def at(past: BootHistory, address: int, time: int) -> Lifetime:
    lifetime = past.at(address, time)[0]
    assert lifetime is not None
    return lifetime


def test_lines_are_told_after_the_unload(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    starts = kept.load(3, 2)
    for start in starts:
        kept.unload(start, 3)
    kept.writer.close(1000)
    with History(kept.path) as history:
        past = past_of(history)
        lifetime = at(past, starts[1] + 9, 32)
        line = past.programs.line(lifetime, 9)
        program = past.programs.of(lifetime)
    assert line is not None
    assert (line.file, line.line) == (FILE, 112)
    assert line.text == "hash = mix(1, 2);"
    assert program is not None
    assert (program.tag, program.type, program.uid, program.load_time) == (TAG, 3, 1000, 5)
    assert program.problem == ""


def test_what_was_gone_too_soon_is_said_and_does_not_replace_what_is_known(
    tmp_path: Path,
) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    starts = kept.load(1, 1)
    kept.writer.commit(100)
    for prog_id in (1, 2):
        kept.writer.note_program(ProgramDetails(prog_id, GONE))
    lost = load(BASE, 0x100, f"bpf_prog_{TAG}_lost", 7, 2)
    kept._apply(lost)
    kept.writer.close(1000)
    with History(kept.path) as history:
        past = past_of(history)
        assert past.programs.line(at(past, starts[0], 50), 0) is not None
        gone = past.programs.of(at(past, BASE, 50))
        assert gone is not None
        assert (gone.problem, gone.tag, gone.table) == (GONE, "", None)
        assert [warning for warning in past.warnings() if "1 programs" in warning]


def test_what_is_forgotten_takes_its_lines_along(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    for prog_id in (1, 2, 3):
        (start,) = kept.load(prog_id, 1, salt=prog_id)
        kept.unload(start, prog_id)
    kept.writer.commit(100)
    kept.writer.forget(30)
    kept.writer.close(1000)
    database = sqlite3.connect(kept.path)
    assert database.execute("SELECT prog_id FROM program").fetchall() == [(3,)]
    assert database.execute("SELECT count(*) FROM line_table").fetchone() == (1,)
    database.close()


def test_a_function_takes_at_most_400_bytes_where_tables_repeat(tmp_path: Path) -> None:
    programs, functions, different = 400, 5, 20
    kept = Kept(str(tmp_path / "h.db"))
    for number in range(programs):
        kept.load(number, functions, salt=number % different)
    kept.writer.close(10_000)
    assert os.path.getsize(kept.path) / (programs * functions) <= 400


def test_a_start_that_is_not_the_programs_has_no_line(tmp_path: Path) -> None:
    kept = Kept(str(tmp_path / "h.db"))
    kept.load(1, 1)
    kept._apply(load(BASE + 0x8000, 0x100, "bpf_prog_00000000000000bb_other", 9, 1))
    kept.writer.close(1000)
    with History(kept.path) as history:
        past = past_of(history)
        assert past.programs.line(at(past, BASE + 0x8000, 50), 0) is None
