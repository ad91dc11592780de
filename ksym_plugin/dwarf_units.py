"""Which compile unit of a file holds an address, and what a unit says of itself."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from io import BytesIO

from ksym_plugin.line_program import unsigned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from elftools.dwarf.abbrevtable import AbbrevDecl
    from elftools.dwarf.compileunit import CompileUnit
    from elftools.dwarf.dwarfinfo import DWARFInfo
    from elftools.elf.elffile import ELFFile

    #: First address, the one after the last, and the unit's offset.
    _Range = tuple[int, int, int]

_IMPLICIT_CONST: Final = 0x21
_TOP: Final = (1 << 64) - 1


def dwarf_of(elf: ELFFile) -> DWARFInfo | None:
    """The file's DWARF, None where it has no lines."""
    from elftools.common.exceptions import ELFCompressionError

    if elf.get_section_by_name(".zdebug_info") is not None:
        # pyelftools expects that all sections are compressed in that old way, and some are.
        raise ELFCompressionError(".zdebug_info")
    abbreviations = elf.get_section_by_name(".debug_abbrev")
    needed = (".debug_info", ".debug_line")
    if abbreviations is None or any(elf.get_section_by_name(name) is None for name in needed):
        return None
    most = os.fstat(elf.stream.fileno()).st_size
    for part in elf.iter_sections():
        # pyelftools makes zeros of what is not in the file, whatever size is claimed.
        if part.name.startswith((".debug_", ".eh_frame")) and part["sh_size"] > most:
            raise ValueError(part.name)
    # Kernels that can be moved keep their relocations (--emit-relocs), ten million of them,
    # which the linker has applied already.
    is_relocatable = elf["e_type"] == "ET_REL"
    dwarf = elf.get_dwarf_info(relocate_dwarf_sections=is_relocatable, follow_links=False)
    code = abbreviations.data()
    tables: dict[int, _Abbreviations] = {}

    def table(offset: int) -> _Abbreviations:
        if offset not in tables:
            tables[offset] = _Abbreviations(dwarf, code, offset)
        return tables[offset]

    # It has to quack no more than that.
    dwarf.get_abbrev_table = table  # type: ignore[assignment, method-assign]
    return dwarf


class _Abbreviations:
    """pyelftools' AbbrevTable, of which only what is asked for is made.

    That is what a unit's first entry is made of, and all of a kernel's tables take
    pyelftools a quarter of a minute.
    """

    def __init__(self, dwarf: DWARFInfo, code: bytes, offset: int) -> None:
        self._dwarf = dwarf
        self._code = code
        self._next = offset
        self._places: dict[int, int] = {}

    def get_abbrev(self, number: int) -> AbbrevDecl:
        """The declaration of that number; KeyError if there is none."""
        from elftools.common.utils import struct_parse
        from elftools.dwarf.abbrevtable import AbbrevDecl

        while number not in self._places:
            found, at = unsigned(self._code, self._next)
            if found == 0:
                raise KeyError(number)
            self._places[found] = at
            self._next = _behind(self._code, at)
        shape = self._dwarf.structs.Dwarf_abbrev_declaration
        declaration = struct_parse(shape, BytesIO(self._code), self._places[number])
        return AbbrevDecl(number, declaration)


def _behind(code: bytes, at: int) -> int:
    """Where a declaration that begins at ``at`` ends (DWARF 5, section 7.5.3)."""
    _, at = unsigned(code, at)
    at += 1
    attribute = form = 1
    while attribute or form:
        attribute, at = unsigned(code, at)
        form, at = unsigned(code, at)
        if form == _IMPLICIT_CONST:
            _, at = unsigned(code, at)
    return at


class Units:
    """Which unit is where; the offsets are those in .debug_info.

    .debug_aranges tells most of it. clang tells there of no unit, so beside assembly, of
    which it does, all are looked at.
    """

    __slots__ = ("ends", "offsets", "starts")

    def __init__(self, dwarf: DWARFInfo) -> None:
        told = dwarf.get_aranges()
        found: list[_Range] = [
            (entry.begin_addr, entry.begin_addr + entry.length, entry.info_offset)
            for entry in (told.entries if told else ())
        ]
        known = {offset for _, _, offset in found}
        for unit in dwarf.iter_CUs():
            if unit.cu_offset not in known:
                found += [(low, high, unit.cu_offset) for low, high in _extents(dwarf, unit)]
        # Linkers leave units of what they dropped at the top, or at the bottom.
        found = sorted(one for one in found if 0 < one[0] < one[1] <= _TOP)
        self.starts = array("Q", [low for low, _, _ in found])
        self.ends = array("Q", [high for _, high, _ in found])
        self.offsets = array("Q", [offset for _, _, offset in found])

    def find(self, address: int) -> int | None:
        """The offset of the unit that holds a linked address."""
        at = bisect_right(self.starts, address) - 1
        if at < 0 or address >= self.ends[at]:
            return None
        return self.offsets[at]


def _extents(dwarf: DWARFInfo, unit: CompileUnit) -> Iterator[tuple[int, int]]:
    """The address ranges of a unit."""
    from elftools.dwarf.ranges import BaseAddressEntry

    top = unit.get_top_DIE()
    low = top.attributes.get("DW_AT_low_pc")
    high = top.attributes.get("DW_AT_high_pc")
    if low is not None and high is not None:
        # An address, or since DWARF 4 the distance to it.
        is_address = high.form == "DW_FORM_addr"
        yield low.value, high.value if is_address else low.value + high.value
        return
    at = top.attributes.get("DW_AT_ranges")
    ranges = dwarf.range_lists()
    if at is None or ranges is None:
        return
    base = 0 if low is None else low.value
    for entry in ranges.get_range_list_at_offset(at.value, unit):
        if isinstance(entry, BaseAddressEntry):
            base = entry.base_address
            continue
        start = 0 if getattr(entry, "is_absolute", False) else base
        yield start + entry.begin_offset, start + entry.end_offset
