"""Source lines of a kernel from its DWARF: read when asked for, a compile unit at a time."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right

from ksym_plugin import cache_file
from ksym_plugin.dwarf_units import Units, dwarf_of, text, top_of, whole
from ksym_plugin.elf import opened, refused_if_damaged
from ksym_plugin.elf_table import TOP
from ksym_plugin.line_answers import Answers
from ksym_plugin.line_header import LINE_STRP, STRP, Header
from ksym_plugin.line_program import NO_LINE, Rows
from ksym_plugin.timeline.packed import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from elftools.dwarf.dwarfinfo import DWARFInfo

    from ksym_plugin.elf import Image
    from ksym_plugin.line_header import Name


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
        if self._dwarf is not None:
            self._dwarf.close()
        self._answers.store()

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
        self._programs: dict[int, _Program] = {}
        self._places: Units | None = None
        with contextlib.ExitStack() as stack:
            self._dwarf = dwarf_of(stack.enter_context(opened(path)))
            self.has_any = self._dwarf is not None
            section = None if self._dwarf is None else self._dwarf.debug_line_sec
            self._code = b"" if section is None else whole(section)
            self._unread = len(self._code)
            self.close = stack.pop_all().close

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
            unit = self._units[offset] = self._unit(self._dwarf, offset)
        return unit.find(linked)

    def _unit(self, dwarf: DWARFInfo, offset: int) -> _Unit:
        attributes = top_of(dwarf.get_CU_at(offset)).attributes
        folder, place = attributes.get("DW_AT_comp_dir"), attributes.get("DW_AT_stmt_list")
        program = None if place is None else self._program(dwarf, place.value)
        return _Unit(program, "" if folder is None else text(folder.value))

    def _program(self, dwarf: DWARFInfo, offset: int) -> _Program:
        found = self._programs.get(offset)
        if found is None:
            order: Literal["little", "big"] = "little" if dwarf.config.little_endian else "big"
            header = Header(self._code, offset, order)
            # Programs that lie within one another would be run over and over.
            self._unread -= header.end - offset
            if self._unread < 0:
                raise ValueError(offset)
            found = self._programs[offset] = _Program(dwarf, header, self._code)
        return found


class _Program:
    """The rows and the files of a line program."""

    def __init__(self, dwarf: DWARFInfo, header: Header, code: bytes) -> None:
        self._dwarf = dwarf
        self._header = header
        self.rows = Rows(header, code[header.start : header.end])

    def file(self, number: int, folder: str) -> str | None:
        """The path of a file; ``folder`` is where the unit was compiled."""
        header = self._header
        if number >= len(header.files):
            return None
        name, within = header.files[number]
        place = header.folders[within] if within < len(header.folders) else b""
        joined = os.path.join(folder, self._name(place), self._name(name))
        return os.path.normpath(joined)

    def _name(self, name: Name) -> str:
        if isinstance(name, bytes):
            return text(name)
        form, at = name
        if form == LINE_STRP:
            return text((self._dwarf.debug_line_str_sec, at))
        # dwz moves strings into another file (.gnu_debugaltlink).
        return text((self._dwarf.debug_str_sec, at)) if form == STRP else ""


class _Unit:
    """A compile unit: the program it has, and the folder it was compiled in."""

    def __init__(self, program: _Program | None, folder: str) -> None:
        self._program = program
        self._folder = folder
        self._files: dict[int, str | None] = {}

    def find(self, linked: int) -> Line | None:
        """The line of the instruction at a linked address."""
        if self._program is None:
            return None
        rows = self._program.rows
        at = bisect_right(rows.addresses, linked) - 1
        if at < 0 or rows.lines[at] == NO_LINE:
            return None
        number = rows.files[at]
        if number not in self._files:
            self._files[number] = self._program.file(number, self._folder)
        file = self._files[number]
        return None if file is None else Line(file, rows.lines[at], rows.columns[at], "")
