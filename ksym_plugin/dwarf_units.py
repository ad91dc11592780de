"""Which compile unit of a file holds an address, and what a unit says of itself."""

from __future__ import annotations

import functools
import os
from array import array
from bisect import bisect_right
from io import BytesIO
from struct import iter_unpack, unpack_from

from ksym_plugin.leb128 import unsigned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final, Union

    from elftools.dwarf.abbrevtable import AbbrevDecl
    from elftools.dwarf.compileunit import CompileUnit
    from elftools.dwarf.die import DIE
    from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DWARFInfo
    from elftools.elf.elffile import ELFFile

    #: First address, the one after the last, and the unit's offset.
    _Range = tuple[int, int, int]
    #: Where a string is.
    _Place = tuple[Union[DebugSectionDescriptor, None], int]

_IMPLICIT_CONST: Final = 0x21
_TOP: Final = (1 << 64) - 1
#: Attributes of these forms take no room in an entry.
_SIZELESS: Final = frozenset(("DW_FORM_implicit_const", "DW_FORM_flag_present"))
#: Of compressed sections, how many times the file's size they may be in all.
_MOST_EXPANDED: Final = 32
#: Longer names are cut: a file could have many that are each as long as itself (PATH_MAX).
_LONGEST: Final = 4096


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
    expanded = 0
    for part in elf.iter_sections():
        if not part.name.startswith((".debug_", ".eh_frame")):
            continue
        # pyelftools makes zeros of what is not in the file, whatever size is claimed.
        if part["sh_size"] > most:
            raise ValueError(part.name)
        expanded += part.data_size
    if expanded > _MOST_EXPANDED * most:
        raise ValueError(expanded)
    # Kernels that can be moved keep their relocations (--emit-relocs), ten million of them,
    # which the linker has applied already.
    is_relocatable = elf["e_type"] == "ET_REL"
    dwarf = elf.get_dwarf_info(relocate_dwarf_sections=is_relocatable, follow_links=False)
    code = _Code(abbreviations.data())
    tables: dict[int, _Abbreviations] = {}

    def table(offset: int) -> _Abbreviations:
        if offset not in tables:
            tables[offset] = _Abbreviations(dwarf, code, offset)
        return tables[offset]

    # pyelftools makes its tables itself, whole, and lets nobody give it others.
    dwarf.get_abbrev_table = table  # type: ignore[assignment, method-assign]
    # Most strings nobody asks for; ``text`` reads those that are.
    strings, line_strings = dwarf.debug_str_sec, dwarf.debug_line_str_sec
    for name, section in (("table", strings), ("linetable", line_strings)):
        setattr(dwarf, f"get_string_from_{name}", functools.partial(_place, section))
    return dwarf


def _place(section: DebugSectionDescriptor | None, at: int) -> _Place:
    return section, at


def text(value: object) -> str:
    """A string, or a section and where in it there is one; empty for all else.

    dwz moves strings into another file (.gnu_debugaltlink): then there is a number here.
    """
    if isinstance(value, tuple) and value[0] is not None:
        section, at = value
        section.stream.seek(at)
        value = section.stream.read(_LONGEST)
    if not isinstance(value, bytes):
        return ""
    return value.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def top_of(unit: CompileUnit) -> DIE:
    """What a unit says of itself; ValueError if that does not end within the unit."""
    top = unit.get_top_DIE()
    if top.offset + top.size > unit.cu_offset + unit.size:
        raise ValueError(unit.cu_offset)
    return top


def whole(section: DebugSectionDescriptor) -> bytes:
    """All bytes of a section."""
    section.stream.seek(0)
    return section.stream.read()


class _Code:
    """The bytes of .debug_abbrev; ``unread`` is how many have not been read as a table."""

    __slots__ = ("data", "unread")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.unread = len(data)


class _Abbreviations:
    """pyelftools' AbbrevTable, of which only what is asked for is made.

    That is what a unit's first entry is made of, and all of a kernel's tables take
    pyelftools a quarter of a minute. Attributes without a value in the entry are left out:
    a unit of ten bytes could have thousands.
    """

    def __init__(self, dwarf: DWARFInfo, code: _Code, offset: int) -> None:
        self._dwarf = dwarf
        self._code = code
        self._next = offset
        self._places: dict[int, int] = {}
        self._made: dict[int, AbbrevDecl] = {}

    def get_abbrev(self, number: int) -> AbbrevDecl:
        """The declaration of that number; KeyError if there is none."""
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = self._make(number)
        return found

    def _make(self, number: int) -> AbbrevDecl:
        from elftools.common.utils import struct_parse
        from elftools.dwarf.abbrevtable import AbbrevDecl

        data = self._code.data
        while number not in self._places:
            found, at = unsigned(data, self._next)
            if found == 0:
                raise KeyError(number)
            self._places[found] = at
            self._code.unread += self._next
            self._next = _behind(data, at)
            # Tables that lie within one another would be read over and over.
            self._code.unread -= self._next
            if self._code.unread < 0:
                raise ValueError(number)
        shape = self._dwarf.structs.Dwarf_abbrev_declaration
        declaration = struct_parse(shape, BytesIO(data), self._places[number])
        specs = [one for one in declaration["attr_spec"] if one.form not in _SIZELESS]
        declaration["attr_spec"] = specs
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
        section = dwarf.debug_aranges_sec
        order = "<" if dwarf.config.little_endian else ">"
        found = [] if section is None else list(_told(whole(section), order))
        known = {offset for _, _, offset in found}
        units = set()
        listed = (dwarf.debug_ranges_sec, dwarf.debug_rnglists_sec)
        # An entry takes two bytes at least, so there are more only in lists that lie within
        # one another, which would be read over and over.
        unread = sum(section.size for section in listed if section is not None)
        for unit in dwarf.iter_CUs():
            units.add(unit.cu_offset)
            if unit.cu_offset not in known:
                extents, read = _extents(dwarf, unit)
                found += [(low, high, unit.cu_offset) for low, high in extents]
                unread -= read
                if unread < 0:
                    raise ValueError(unit.cu_offset)
        # Linkers leave units of what they dropped at the top, or at the bottom. Where no unit
        # begins, there may be any number within one another.
        found = sorted(one for one in found if 0 < one[0] < one[1] <= _TOP and one[2] in units)
        self.starts = array("Q", [low for low, _, _ in found])
        self.ends = array("Q", [high for _, high, _ in found])
        self.offsets = array("Q", [offset for _, _, offset in found])

    def find(self, address: int) -> int | None:
        """The offset of the unit that holds a linked address."""
        at = bisect_right(self.starts, address) - 1
        if at < 0 or address >= self.ends[at]:
            return None
        return self.offsets[at]


def _told(data: bytes, order: str) -> Iterator[_Range]:
    """What .debug_aranges tells (section 6.1.2). pyelftools reads each set to its last entry,
    however short the set says it is."""
    at = 0
    while at < len(data):
        start = at
        (length,), at, word = unpack_from(f"{order}I", data, at), at + 4, "I"
        if length == 0xFFFF_FFFF:
            (length,), at, word = unpack_from(f"{order}Q", data, at), at + 8, "Q"
        end = at + length
        _, offset, address, segment = unpack_from(f"{order}H{word}BB", data, at)
        if address not in (4, 8) or segment:
            raise ValueError(start)
        at += 4 + (4 if word == "I" else 8)
        # Entries are aligned to their size, from the beginning of the set.
        at += (start - at) % (2 * address)
        room = max(min(end, len(data)) - at, 0)
        pair = f"{order}2{'I' if address == 4 else 'Q'}"
        for low, size in iter_unpack(pair, data[at : at + room - room % (2 * address)]):
            if size:
                yield low, low + size, offset
        at = end


def _extents(dwarf: DWARFInfo, unit: CompileUnit) -> tuple[list[tuple[int, int]], int]:
    """The address ranges of a unit, and how many entries of lists were read for them."""
    from elftools.dwarf.ranges import BaseAddressEntry

    top = top_of(unit)
    low = top.attributes.get("DW_AT_low_pc")
    high = top.attributes.get("DW_AT_high_pc")
    if low is not None and high is not None:
        # An address, or since DWARF 4 the distance to it.
        is_address = high.form == "DW_FORM_addr"
        return [(low.value, high.value if is_address else low.value + high.value)], 0
    at = top.attributes.get("DW_AT_ranges")
    ranges = dwarf.range_lists()
    if at is None or ranges is None:
        return [], 0
    base = 0 if low is None else low.value
    entries = ranges.get_range_list_at_offset(at.value, unit)
    found = []
    for entry in entries:
        if isinstance(entry, BaseAddressEntry):
            base = entry.base_address
            continue
        start = 0 if getattr(entry, "is_absolute", False) else base
        found.append((start + entry.begin_offset, start + entry.end_offset))
    return found, len(entries)
