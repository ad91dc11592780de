"""Source lines of a kernel from its DWARF: read when asked for, a compile unit at a time."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right

from ksym_plugin.elf import opened, refused_if_damaged
from ksym_plugin.line_table import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from elftools.dwarf.compileunit import CompileUnit
    from elftools.dwarf.dwarfinfo import DWARFInfo
    from elftools.dwarf.lineprogram import LineProgram

    from ksym_plugin.elf import Image

    #: Address, line, column, and the file's number; the end of a sequence has line -1.
    _Row = tuple[int, int, int, int]

_END: Final = -1


class ImageLines:
    """The lines of a running kernel's image; close it in the end. Raises ElfError.

    The first answer takes the time to read which unit is where, then each unit costs its
    own lines once.
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._units: dict[int, _Unit] = {}
        self._told: Any = None
        self._found: _Ranges | None = None
        with contextlib.ExitStack() as stack:
            elf = stack.enter_context(opened(image.file.path))
            self._dwarf: Any = elf.get_dwarf_info() if elf.has_dwarf_info() else None
            self._open = stack.pop_all()

    def close(self) -> None:
        self._open.close()

    def line(self, address: int) -> Line | None:
        """The line of the instruction at an address in the kernel's memory."""
        with refused_if_damaged(self._image.file.path):
            return self._line(address)

    def _line(self, address: int) -> Line | None:
        linked = address - self._image.offset
        offset = None if self._dwarf is None or linked < 0 else self._unit_at(linked)
        if offset is None:
            return None
        unit = self._units.get(offset)
        if unit is None:
            unit = self._units[offset] = _Unit(self._dwarf, self._dwarf.get_CU_at(offset))
        return unit.find(linked)

    def _unit_at(self, linked: int) -> int | None:
        """The offset of the compile unit that holds an address."""
        if self._told is None:
            self._told = self._dwarf.get_aranges() or False
        offset: int | None = self._told.cu_offset_at_addr(linked) if self._told else None
        if offset is None:
            # clang tells of no unit, so beside assembly, of which it does, all are looked at.
            self._found = self._found or _Ranges(self._dwarf)
            offset = self._found.cu_offset_at_addr(linked)
        return offset


class _Ranges:
    """Which unit is where, by the units themselves; takes some seconds for a kernel."""

    def __init__(self, dwarf: DWARFInfo) -> None:
        found = []
        for unit in dwarf.iter_CUs():
            found += [(low, high, unit.cu_offset) for low, high in _extents(dwarf, unit)]
        self._ranges = sorted(found)
        self._starts = [low for low, _, _ in self._ranges]

    def cu_offset_at_addr(self, address: int) -> int | None:
        """The unit's offset, as pyelftools' ARanges has it."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._ranges[at][1]:
            return None
        offset: int = self._ranges[at][2]
        return offset


class _Unit:
    """The rows of one compile unit, sorted."""

    def __init__(self, dwarf: DWARFInfo, unit: CompileUnit) -> None:
        program = dwarf.line_program_for_CU(unit)
        self._rows: list[_Row] = [] if program is None else _rows(program)
        self._addresses = [row[0] for row in self._rows]
        self._files = [] if program is None else _files(program, _folder(unit))
        # Files are counted from 0 only since DWARF 5.
        self._first = 0 if program is None or program["version"] >= 5 else 1

    def find(self, linked: int) -> Line | None:
        at = bisect_right(self._addresses, linked) - 1
        if at < 0:
            return None
        _, line, column, file = self._rows[at]
        number = file - self._first
        if line <= 0 or not 0 <= number < len(self._files):
            return None
        return Line(self._files[number], line, column, "")


def _rows(program: LineProgram) -> list[_Row]:
    """All rows by address; at one address an end comes before what begins there."""
    found: list[_Row] = []
    for entry in program.get_entries():
        state = entry.state
        if state is not None:
            line = _END if state.end_sequence else state.line
            found.append((state.address, line, state.column, state.file))
    found.sort(key=lambda row: (row[0], row[1] != _END))
    return found


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


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _extents(dwarf: DWARFInfo, unit: CompileUnit) -> list[tuple[int, int]]:
    """The address ranges of a unit."""
    from elftools.dwarf.ranges import BaseAddressEntry

    top = unit.get_top_DIE()
    low = top.attributes.get("DW_AT_low_pc")
    high = top.attributes.get("DW_AT_high_pc")
    if low is not None and high is not None:
        # An address, or since DWARF 4 the distance to it.
        is_address = high.form == "DW_FORM_addr"
        return [(low.value, high.value if is_address else low.value + high.value)]
    at = top.attributes.get("DW_AT_ranges")
    ranges = dwarf.range_lists()
    if at is None or ranges is None:
        return []
    base = 0 if low is None else low.value
    found = []
    for entry in ranges.get_range_list_at_offset(at.value, unit):
        if isinstance(entry, BaseAddressEntry):
            base = entry.base_address
            continue
        start = 0 if getattr(entry, "is_absolute", False) else base
        found.append((start + entry.begin_offset, start + entry.end_offset))
    return found
