"""Source lines of a kernel from its DWARF: read when asked for, a compile unit at a time."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right

from ksym_plugin import cache_file
from ksym_plugin.dwarf_units import Units, dwarf_of
from ksym_plugin.elf import opened, refused_if_damaged
from ksym_plugin.elf_table import TOP
from ksym_plugin.line_answers import Answers
from ksym_plugin.line_program import NO_LINE, Rows
from ksym_plugin.line_table import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elftools.dwarf.compileunit import CompileUnit
    from elftools.dwarf.dwarfinfo import DWARFInfo
    from elftools.dwarf.lineprogram import LineProgram

    from ksym_plugin.elf import Image


class ImageLines:
    """The lines of a running kernel's image; close it in the end. Raises ElfError.

    The first answer takes the time to read which unit is where, then each unit costs its
    own lines once. What was told is kept (see line_answers).
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._dwarf: _Dwarf | None = None
        try:
            identity = cache_file.identity(image.file.path)
        except OSError:
            identity = None
        self._answers = Answers(identity)

    @property
    def exist(self) -> bool:
        """Whether the file has any."""
        with refused_if_damaged(self._image.file.path):
            return bool(self._answers.known) or self._opened().has_any

    def close(self) -> None:
        """Let go of the file, and keep what was told."""
        self._answers.store()
        if self._dwarf is not None:
            self._dwarf.close()

    def line(self, address: int) -> Line | None:
        """The line of the instruction at an address in the kernel's memory."""
        linked = address - self._image.offset
        if not 0 <= linked <= TOP:
            return None
        try:
            return self._answers.known[linked]
        except KeyError:
            pass
        with refused_if_damaged(self._image.file.path):
            dwarf = self._opened()
            found = dwarf.line(linked)
        if dwarf.has_any:
            self._answers.add(linked, found)
        return found

    def _opened(self) -> _Dwarf:
        if self._dwarf is None:
            self._dwarf = _Dwarf(self._image.file.path)
        return self._dwarf


class _Dwarf:
    """The DWARF of a file, and the units of it that were needed."""

    def __init__(self, path: str) -> None:
        self._units: dict[int, _Unit] = {}
        self._places: Units | None = None
        with contextlib.ExitStack() as stack:
            self._dwarf = dwarf_of(stack.enter_context(opened(path)))
            self.close = stack.pop_all().close
        self.has_any = self._dwarf is not None

    def line(self, linked: int) -> Line | None:
        """The line of the instruction at a linked address."""
        if self._dwarf is None:
            return None
        if self._places is None:
            self._places = Units(self._dwarf)
        offset = self._places.find(linked)
        if offset is None:
            return None
        unit = self._units.get(offset)
        if unit is None:
            unit = self._units[offset] = _Unit(self._dwarf, self._dwarf.get_CU_at(offset))
        return unit.find(linked)


class _Unit:
    """The rows of one compile unit, sorted."""

    def __init__(self, dwarf: DWARFInfo, unit: CompileUnit) -> None:
        program = dwarf.line_program_for_CU(unit)
        self._rows = None if program is None else Rows(program)
        self._files = [] if program is None else _files(program, _folder(unit))
        # Files are counted from 0 only since DWARF 5.
        self._first = 0 if program is None or program["version"] >= 5 else 1

    def find(self, linked: int) -> Line | None:
        rows = self._rows
        at = -1 if rows is None else bisect_right(rows.addresses, linked) - 1
        if rows is None or at < 0 or rows.lines[at] == NO_LINE:
            return None
        number = rows.files[at] - self._first
        if not 0 <= number < len(self._files):
            return None
        return Line(self._files[number], rows.lines[at], rows.columns[at], "")


def _files(program: LineProgram, folder: str) -> list[str]:
    header = program.header
    folders = [_decoded(name) for name in header["include_directory"]]
    if program["version"] < 5:
        folders.insert(0, folder)
    names = []
    for entry in header["file_entry"]:
        number = entry.dir_index
        within = folders[number] if number < len(folders) else ""
        names.append(os.path.normpath(os.path.join(folder, within, _decoded(entry.name))))
    return names


def _folder(unit: CompileUnit) -> str:
    attribute = unit.get_top_DIE().attributes.get("DW_AT_comp_dir")
    return "" if attribute is None else _decoded(attribute.value)


def _decoded(name: object) -> str:
    # dwz moves strings into another file (.gnu_debugaltlink): then there is a number here.
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else ""
