"""Source lines of a kernel from its DWARF: read when asked for, a compile unit at a time."""

from __future__ import annotations

import contextlib
import functools
import os
from array import array
from bisect import bisect_right
from io import BytesIO
from operator import itemgetter
from struct import iter_unpack, unpack_from

from ksym_plugin.kernel import cache
from ksym_plugin.kernel.elf import TOP, opened, refused_if_damaged
from ksym_plugin.timeline.packed import Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Literal, Union

    #: A string, or its form and where it is in that form's section.
    Name = Union[bytes, tuple[int, int]]
    #: What an entry tells, and the form of that.
    _Format = list[tuple[int, int]]
    from collections.abc import Iterator

    #: Address, line, column, and the file's number.
    _Row = tuple[int, int, int, int]
    from typing import Union

    from elftools.dwarf.abbrevtable import AbbrevDecl
    from elftools.dwarf.compileunit import CompileUnit
    from elftools.dwarf.die import DIE
    from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DWARFInfo
    from elftools.elf.elffile import ELFFile

    #: First address, the one after the last, and the unit's offset.
    _Range = tuple[int, int, int]
    #: Where a string is.
    _Place = tuple[Union[DebugSectionDescriptor, None], int]

    from ksym_plugin.kernel.elf import Image

_MOST_BITS: Final = 128


def unsigned(code: bytes, at: int) -> tuple[int, int]:
    """A ULEB128, and where what follows it is; ValueError for one that is absurdly long."""
    byte = code[at]
    at += 1
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        if shift > _MOST_BITS:
            raise ValueError(shift)
        byte = code[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at


def signed(code: bytes, at: int) -> tuple[int, int]:
    """An SLEB128, and where what follows it is."""
    value, after = unsigned(code, at)
    if code[after - 1] & 0x40:
        value -= 1 << 7 * (after - at)
    return value, after


_CACHED: Final = "lines"
#: Addresses, and of each the file's number and the line (0: none is known); files.
_CODES: Final = "QII"
#: So many are kept; some 30 bytes each.
MOST: Final = 1 << 18


class Answers:
    """Lines by address; of None it is known that there is no line."""

    def __init__(self, identity: tuple[int, ...] | None) -> None:
        """``identity`` is the file's (see cache_file), None where nothing is to be kept."""
        self._identity = identity
        self._has_news = False
        self.known: dict[int, Line | None] = {}
        parts = identity and cache.load(_CACHED, identity, len(_CODES) + 1)
        if parts:
            self.known = _unpacked(parts)

    def add(self, address: int, line: Line | None) -> None:
        if len(self.known) < MOST:
            self.known[address] = line
            self._has_news = True

    def store(self) -> None:
        """Keep what is known, if some of it is new."""
        if self._has_news and self._identity is not None:
            cache.store(_CACHED, self._identity, _packed(self.known))
            self._has_news = False


def _packed(known: dict[int, Line | None]) -> list[bytes]:
    files = {"": 0}
    columns = [array(code) for code in _CODES]
    for address, line in known.items():
        if line is None:
            row = (address, 0, 0)
        else:
            number = files.setdefault(line.file, len(files))
            row = (address, number, line.line)
        for column, value in zip(columns, row):
            column.append(value)
    names = "\0".join(files).encode("utf-8", "backslashreplace")
    return [*(column.tobytes() for column in columns), names]


def _unpacked(parts: list[bytes]) -> dict[int, Line | None]:
    """Nothing for what was not packed here."""
    names = parts[-1].decode("utf-8", "backslashreplace").split("\0")
    columns = [array(code) for code in _CODES]
    try:
        for column, part in zip(columns, parts):
            column.frombytes(part)
        if len({len(column) for column in columns}) != 1:
            return {}
        return {
            address: Line(names[number], line, "") if line else None
            for address, number, line in zip(*columns)
        }
    except (ValueError, IndexError):
        return {}


STRP: Final = 0x0E
LINE_STRP: Final = 0x1F
_STRING: Final = 0x08
_BLOCK: Final = 0x09
_UDATA: Final = 0x0F
_STRP_SUP: Final = 0x1D
_GNU_STRP_ALT: Final = 0x1F21
_OFFSETS: Final = frozenset((STRP, LINE_STRP, _STRP_SUP, _GNU_STRP_ALT))
#: data1, data2, data4, data8 and data16.
_SIZES: Final = {0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8, 0x1E: 16}
_PATH: Final = 1
_FOLDER: Final = 2


class Header:
    """What a program is run with: ``start`` and ``end`` are where its opcodes are.

    ``files`` are names with the number of each one's folder; both lists are numbered as the
    program does it. From DWARF 5 on the first of ``folders`` is the unit's own, before it is
    an empty name. ValueError, IndexError or struct.error for what is damaged.
    """

    def __init__(self, code: bytes, offset: int, order: Literal["little", "big"]) -> None:
        self._code = code
        self.order = order
        self._mark = "<" if order == "little" else ">"
        (length,), at = unpack_from(f"{self._mark}I", code, offset), offset + 4
        self._word = 4
        if length == 0xFFFF_FFFF:
            (length,), at = unpack_from(f"{self._mark}Q", code, at), at + 8
            self._word = 8
        self.end = at + length
        (version,), at = unpack_from(f"{self._mark}H", code, at), at + 2
        if not 2 <= version <= 5:
            raise ValueError(version)
        # The sizes of addresses and of segment selectors.
        at += 2 if version == 5 else 0
        length, at = self._offset(at)
        self.start = at + length
        if not at <= self.start <= self.end <= len(code):
            raise ValueError(self.end)
        self.unit = code[at]
        # How many operations an instruction holds, and whether rows begin a statement.
        at += 3 if version >= 4 else 2
        self.base, self.span, self.first_special = unpack_from("bBB", code, at)
        self.lengths = code[at + 3 : at + 2 + self.first_special]
        at += 2 + self.first_special
        self.folders: list[Name] = [b""]
        self.files: list[tuple[Name, int]] = [(b"", 0)]
        if version == 5:
            entries, at = self._entries(at)
            self.folders = [name for name, _ in entries]
            self.files, at = self._entries(at)
        else:
            self._legacy(at)

    def _legacy(self, at: int) -> None:
        while self._code[at]:
            name, at = self._string(at)
            self.folders.append(name)
        at += 1
        while self._code[at]:
            file, at = self._string(at)
            folder, at = unsigned(self._code, at)
            _, at = unsigned(self._code, at)
            _, at = unsigned(self._code, at)
            self.files.append((file, folder))

    def _entries(self, at: int) -> tuple[list[tuple[Name, int]], int]:
        pairs, at = self._code[at], at + 1
        form: _Format = []
        for _ in range(pairs):
            kind, at = unsigned(self._code, at)
            of, at = unsigned(self._code, at)
            form.append((kind, of))
        count, at = unsigned(self._code, at)
        if count and not form:
            raise ValueError(count)
        found: list[tuple[Name, int]] = []
        # No form is of no size, so what is not there ends it.
        for _ in range(count):
            name: Name = b""
            folder = 0
            for kind, of in form:
                value, at = self._value(of, at)
                if kind == _PATH and not isinstance(value, int):
                    name = value
                elif kind == _FOLDER and isinstance(value, int):
                    folder = value
            found.append((name, folder))
        return found, at

    def _value(self, form: int, at: int) -> tuple[Name | int, int]:
        """A value, and where what follows it is."""
        if at >= self.start:
            raise ValueError(at)
        if form in _OFFSETS:
            offset, at = self._offset(at)
            return (form, offset), at
        if form == _STRING:
            return self._string(at)
        if form == _UDATA:
            return unsigned(self._code, at)
        if form == _BLOCK:
            size, at = unsigned(self._code, at)
            return b"", at + size
        size = _SIZES[form]
        return int.from_bytes(self._code[at : at + size], self.order), at + size

    def _offset(self, at: int) -> tuple[int, int]:
        (value,) = unpack_from(self._mark + ("I" if self._word == 4 else "Q"), self._code, at)
        return value, at + self._word

    def _string(self, at: int) -> tuple[bytes, int]:
        end = self._code.index(b"\0", at, self.start)
        return self._code[at:end], end + 1


#: The line of what no line is known for, as behind the end of a sequence.
NO_LINE: Final = 0

_END_SEQUENCE: Final = 1
_SET_ADDRESS: Final = 2
_COPY: Final = 1
_ADVANCE_PC: Final = 2
_ADVANCE_LINE: Final = 3
_SET_FILE: Final = 4
_SET_COLUMN: Final = 5
_CONST_ADD_PC: Final = 8
_FIXED_ADVANCE_PC: Final = 9
_WORD: Final = (1 << 32) - 1
#: Addresses have no more bytes, and their sums take no longer.
_WIDEST: Final = 8


class Rows:
    """All rows by address; at one address the last is what counts."""

    __slots__ = ("addresses", "columns", "files", "lines")

    def __init__(self, header: Header, code: bytes) -> None:
        """``code`` is the program's, from ``header.start`` to ``header.end``."""
        # By where they begin and end, so that an end comes before what begins there.
        sequences = sorted(_sequences(header, code), key=lambda rows: (rows[0][0], rows[-1][0]))
        rows = [row for sequence in sequences for row in sequence]
        rows.sort(key=itemgetter(0))
        self.addresses = array("Q", [row[0] for row in rows])
        # What is out of range no compiler writes: such a line is not known.
        self.lines = array("I", [row[1] if 0 < row[1] <= _WORD else NO_LINE for row in rows])
        self.columns = array("I", [min(row[2], _WORD) for row in rows])
        self.files = array("I", [min(row[3], _WORD) for row in rows])


def _sequences(  # noqa: C901, PLR0912 - an opcode a branch
    header: Header, code: bytes
) -> Iterator[list[_Row]]:
    """The rows of each sequence, as the program appends them."""
    first_special, unit, order = header.first_special, header.unit, header.order
    base, span = header.base, header.span
    steps = [
        (unit * (number // span), base + number % span) for number in range(256 - first_special)
    ]
    lengths = header.lengths
    rows: list[_Row] = []
    address, line, column, file = 0, 1, 0, 1
    at, end = 0, len(code)
    while at < end:
        opcode = code[at]
        at += 1
        if opcode >= first_special:
            ahead, down = steps[opcode - first_special]
            address += ahead
            line += down
            rows.append((address, line, column, file))
        elif opcode == _SET_COLUMN:
            column, at = unsigned(code, at)
        elif opcode == _ADVANCE_LINE:
            down, at = signed(code, at)
            line += down
        elif opcode == _COPY:
            rows.append((address, line, column, file))
        elif opcode == _ADVANCE_PC:
            ahead, at = unsigned(code, at)
            address += unit * ahead
        elif opcode == _SET_FILE:
            file, at = unsigned(code, at)
        elif opcode == _CONST_ADD_PC:
            address += steps[255 - first_special][0]
        elif opcode == _FIXED_ADVANCE_PC:
            address += int.from_bytes(code[at : at + 2], order)
            at += 2
        elif opcode == 0:
            size, at = unsigned(code, at)
            at += size
            if code[at - size] == _END_SEQUENCE:
                yield [*rows, (address, NO_LINE, 0, 0)]
                rows, address, line, column, file = [], 0, 1, 0, 1
            elif code[at - size] == _SET_ADDRESS:
                if size > 1 + _WIDEST:
                    raise ValueError(size)
                address = int.from_bytes(code[at - size + 1 : at], order)
        else:
            at = _skipped(code, at, lengths[opcode - 1])


def _skipped(code: bytes, at: int, count: int) -> int:
    for _ in range(count):
        _, at = unsigned(code, at)
    return at


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


class ImageLines:
    """The lines of a running kernel's image; close it in the end. Raises ElfError.

    The first answer takes the time to read which unit is where, then each unit costs its
    own lines once. What was told is kept (see line_answers).
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._dwarf: _Dwarf | None = None
        try:
            identity = cache.identity(image.file.path)
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
        return None if file is None else Line(file, rows.lines[at], "")
