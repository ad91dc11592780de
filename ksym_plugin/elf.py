"""The kernel image and modules as their ELF files have them: vmlinux, .debug, .ko.

What kallsyms lacks is here: how long a function is, and with DWARF its source lines. The
files are read through pyelftools, but for the symbol table itself, of which a kernel has
some 200,000 rows.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib

from ksym_plugin import cache_file
from ksym_plugin.elf_table import TOP, FunctionTable
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import KERNEL, UNKNOWN_ADDRESS, Symbol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping
    from typing import Final

    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

    from ksym_plugin.kallsyms import Kallsyms
    from ksym_plugin.timeline.symbols import Reason

_EXECUTABLE: Final = 4  # SHF_EXECINSTR
_NOTYPE: Final = 0
_FUNC: Final = 2
_TYPES: Final = frozenset((_NOTYPE, _FUNC))
_WIDE: Final = "IBBHQQ"  # Elf64_Sym: name, info, other, section, value, size
_NARROW: Final = "IIIBBH"  # Elf32_Sym: name, value, size, info, other, section
#: What is kept of a file: the build id, the anchor, and the table's.
_CACHED: Final = "symbols"
_PARTS: Final = 2 + FunctionTable.PARTS
_ANCHOR: Final = 8
_SMALLEST_HEADER: Final = 40  # Elf32_Shdr
#: Names of sections are shorter.
_LONGEST: Final = 4096


class ElfError(KsymError):
    """An ELF file cannot be used, or is not that of the kernel in question."""


class ElfFile:
    """The functions of one file, sorted by the addresses they were linked at.

    ``build_id`` is in hex, None where there is none. ``anchor`` is the address ``_text``
    was linked at, None where there is no such symbol: the distance to where it is at run
    time is KASLR's offset. Raises ElfError.
    """

    def __init__(self, path: str, sections: Mapping[str, int] | None = None) -> None:
        """``sections`` are the addresses of a module's sections, by name (/sys/module)."""
        self.path = path
        self.build_id: str | None = None
        self.anchor: int | None = None
        with opened(path) as elf:
            self._table = self._read(elf, sections)

    @classmethod
    def kept(cls, path: str) -> ElfFile:
        """The same as ``ElfFile(path)``, sooner from the second time on (see cache_file)."""
        try:
            identity = cache_file.identity(path)
        except OSError:
            return cls(path)
        file = cls._of_parts(path, cache_file.load(_CACHED, identity, _PARTS))
        if file is None:
            file = cls(path)
            cache_file.store(_CACHED, identity, file._parts())
        return file

    def __len__(self) -> int:
        return len(self._table)

    @property
    def starts(self) -> array[int]:
        """Where functions begin, ascending."""
        return self._table.starts

    def aliases(self, start: int) -> list[str]:
        """The other names of the function that begins there, the best first."""
        return self._table.aliases(start)

    def find(self, address: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at a linked address (see FunctionTable)."""
        return self._table.find(address)

    def is_open(self, start: int) -> bool:
        """Whether the file does not say how long the function at ``start`` is."""
        return self._table.is_open(start)

    @classmethod
    def _of_parts(cls, path: str, parts: list[bytes] | None) -> ElfFile | None:
        """The file whose parts these are, None if they are none's."""
        if parts is None:
            return None
        build_id, anchor, *table = parts
        file = cls.__new__(cls)
        file.path = path
        file.build_id = build_id.hex() or None
        file.anchor = int.from_bytes(anchor, "big") if len(anchor) == _ANCHOR else None
        try:
            file._table = FunctionTable.of_parts(table)
        except ValueError:
            return None
        return file

    def _parts(self) -> list[bytes]:
        anchor = b"" if self.anchor is None else self.anchor.to_bytes(_ANCHOR, "big")
        return [bytes.fromhex(self.build_id or ""), anchor, *self._table.parts()]

    def _read(self, elf: ELFFile, sections: Mapping[str, int] | None) -> FunctionTable:
        self.build_id = _build_id(elf, os.path.getsize(self.path))
        table = elf.get_section_by_name(".symtab")
        if table is None or table["sh_type"] != "SHT_SYMTAB":
            raise ElfError(
                f"{self.path} has no symbols", "name a vmlinux that is not stripped, or its .debug"
            )
        bases, reaches = _bases(elf, sections)
        strings = self._data(elf.get_section(table["sh_link"])) + b"\0"
        order = "<" if elf.little_endian else ">"
        rows = struct.iter_unpack(
            order + (_WIDE if elf.elfclass == 64 else _NARROW), self._data(table)
        )
        if elf.elfclass != 64:
            rows = ((row[0], row[3], row[4], row[5], row[1], row[2]) for row in rows)
        anchors = _places_of(b"_text\0", strings)
        found = []
        for name, info, _, section, value, size in rows:
            if name in anchors and section:
                self.anchor = value
            if info & 15 in _TYPES and section in bases and 0 < name < len(strings):
                start = value + bases[section]
                if start < TOP:
                    found.append((start, size, info >> 4, name))
        return FunctionTable(found, strings, reaches)

    def _data(self, section: Section) -> bytes:
        """A section's bytes; a damaged file may claim more than fit into memory."""
        if max(section["sh_size"], section.data_size) > os.path.getsize(self.path):
            raise ValueError(section.name)
        data: bytes = section.data()
        return data


class Image:
    """A vmlinux at the address where a kernel runs; answers as Kallsyms does.

    ``text_start`` is where that kernel has ``_text``. ``behind`` knows the kernel's own
    table, or is None: it names what the file does not, and has the word on labels within
    functions and where the file has no size. Raises ElfError where the file is of another
    kernel: ``build_id`` is the one wanted, None where that is not known.
    """

    def __init__(
        self,
        file: ElfFile,
        text_start: int | None,
        build_id: str | None,
        behind: Kallsyms | None = None,
    ) -> None:
        if build_id is not None and file.build_id is not None and build_id != file.build_id:
            raise ElfError(
                f"{file.path} is of another kernel (build id {file.build_id}, not {build_id})",
                "name the vmlinux or .debug file of that very build",
            )
        if text_start is None or file.anchor is None:
            raise ElfError(
                f"where the code of {file.path} is in the kernel's memory is not known",
                "read /proc/kallsyms as root, or use a history that was recorded as root",
            )
        self.file = file
        self.offset = text_start - file.anchor
        self._behind = behind

    def is_kernel(self, address: int) -> bool:
        """Whether the address is in kernel space, as the kernel's own table has it."""
        return self._behind is not None and self._behind.is_kernel(address)

    def find(self, address: int) -> Symbol | Reason:
        """The function that holds the address, or why there is none."""
        linked = address - self.offset
        # Not taken round the end of the address space: that would be no place in the file.
        found = self.file.find(linked) if 0 <= linked <= TOP else None
        other = UNKNOWN_ADDRESS if self._behind is None else self._behind.find(address)
        if found is None:
            return other
        start, end, name = found
        if isinstance(other, Symbol) and (
            other.start > start + self.offset or self.file.is_open(start)
        ):
            return other
        return Symbol(start + self.offset, end + self.offset, name, KERNEL, None)


def module_sections(name: str, root: str = "/sys/module") -> dict[str, int]:
    """Where a loaded module's sections are; empty where that is hidden."""
    folder = os.path.join(root, name, "sections")
    found = {}
    try:
        for section in os.listdir(folder):
            with open(os.path.join(folder, section), encoding="ascii") as file:
                found[section] = int(file.read(), 16)
    except (OSError, ValueError):
        return {}
    return {section: address for section, address in found.items() if address}


@contextlib.contextmanager
def opened(path: str) -> Iterator[ELFFile]:
    """The file, closed at the end; what is wrong with it becomes an ElfError."""
    from elftools.elf.elffile import ELFFile

    with refused_if_damaged(path), open(path, "rb") as file:
        elf = ELFFile(file)
        _check_sections(elf, os.fstat(file.fileno()).st_size)
        yield elf


@contextlib.contextmanager
def refused_if_damaged(path: str) -> Iterator[None]:
    """Makes an ElfError of what is wrong with a file that is being read."""
    from elftools.common.exceptions import DWARFError, ELFCompressionError, ELFError
    from elftools.construct import ConstructError

    # What pyelftools lets through where a damaged file leads it astray.
    wrong = (ELFError, DWARFError, ConstructError, struct.error, zlib.error)
    astray = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        NotImplementedError,
        TypeError,
        ValueError,
    )
    try:
        yield
    except OSError as error:
        raise ElfError(
            f"{path} cannot be read ({error.strerror})", "name a readable vmlinux"
        ) from None
    except ELFCompressionError:
        raise ElfError(
            f"{path} has sections that are compressed in a way not understood, or damaged",
            "expand them (objcopy --decompress-debug-sections) and name what that makes",
        ) from None
    except (*wrong, *astray):
        raise ElfError(
            f"{path} is no ELF file, or a damaged one", "name a vmlinux, not a vmlinuz"
        ) from None


def _check_sections(elf: ELFFile, size: int) -> None:
    """ValueError for more sections than there can be, or for names without an end.

    pyelftools reads all headers and makes all names, which may lie within one another.
    """
    count, each = elf.num_sections(), elf["e_shentsize"]
    if count * _SMALLEST_HEADER > size:
        raise ValueError(count)
    if not count:
        return
    names = elf.get_section(elf.get_shstrndx())
    elf.stream.seek(names["sh_offset"])
    strings = elf.stream.read(min(names["sh_size"], size))
    elf.stream.seek(elf["e_shoff"])
    headers = elf.stream.read(count * each)
    word = struct.Struct("<I" if elf.little_endian else ">I")
    for number in range(count):
        (at,) = word.unpack_from(headers, number * each)
        if strings.find(b"\0", at, at + _LONGEST) < 0:
            raise ValueError(at)


def _bases(
    elf: ELFFile, sections: Mapping[str, int] | None
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """What to add to a symbol's value, by the number of its section, if that holds code; and
    from where to where each of these reaches."""
    bases, reaches = {}, []
    for number, section in enumerate(elf.iter_sections()):
        if not section["sh_flags"] & _EXECUTABLE:
            continue
        base, start = 0, section["sh_addr"]
        if elf["e_type"] == "ET_REL":
            if section.name not in (sections or {}):
                continue
            base = start = (sections or {})[section.name]
        bases[number] = base
        reaches.append((start, min(start + section["sh_size"], TOP)))
    return bases, reaches


def _places_of(name: bytes, strings: bytes) -> set[int]:
    """Where a string is, also as the end of a longer one: linkers share these."""
    places = set()
    at = strings.find(name)
    while at >= 0:
        places.add(at)
        at = strings.find(name, at + 1)
    return places


def _build_id(elf: ELFFile, most: int) -> str | None:
    from ksym_plugin.kernel_id import build_id_of

    for section in elf.iter_sections():
        if section["sh_type"] == "SHT_NOTE" and section.data_size <= most:
            # Sections may lie within one another.
            most -= section.data_size
            found = build_id_of(section.data())
            if found:
                return found
    return None
