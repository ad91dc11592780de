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
from array import array
from bisect import bisect_right

from ksym_plugin.errors import KsymError
from ksym_plugin.symbols import KERNEL, MODULE, UNKNOWN_ADDRESS, Symbol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Final

    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

    from ksym_plugin.kallsyms import Kallsyms
    from ksym_plugin.symbols import Reason

    #: Start, size, binding, and where the name is.
    _Row = tuple[int, int, int, int]

_EXECUTABLE: Final = 4  # SHF_EXECINSTR
_NOTYPE: Final = 0
_FUNC: Final = 2
_TYPES: Final = frozenset((_NOTYPE, _FUNC))
_DOLLAR: Final = 36
_LOCAL: Final = 0
_WEAK: Final = 2
_TOP: Final = (1 << 64) - 1
_WIDE: Final = "IBBHQQ"  # Elf64_Sym: name, info, other, section, value, size
_NARROW: Final = "IIIBBH"  # Elf32_Sym: name, value, size, info, other, section
#: How far behind the nearest symbol one is looked for that is still long enough.
_MOST_BACK: Final = 64


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
        self._starts = array("Q")
        self._ends = array("Q")
        self._names = array("I")
        #: By start, where the names are that were not chosen, the best first.
        self._others: dict[int, list[int]] = {}
        self._strings = b""
        self._reaches: list[tuple[int, int]] = []
        with opened(path) as elf:
            self._read(elf, sections)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def starts(self) -> array[int]:
        """Where functions begin, ascending."""
        return self._starts

    def aliases(self, start: int) -> list[str]:
        """The other names of the function that begins there, the best first."""
        return [self._string(at) for at in self._others.get(start, ())]

    def find(self, address: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at a linked address, if there is one.

        A function of a known size has all bytes within it. One without, as those written
        in assembly may be, goes on to the next symbol or to the end of its section.
        """
        at = bisect_right(self._starts, address) - 1
        open_at = -1
        for index in range(at, max(at - _MOST_BACK, -1), -1):
            if self._ends[index] == self._starts[index]:
                open_at = index if index == at else open_at
            elif address < self._ends[index]:
                return self._starts[index], self._ends[index], self._name(index)
        if open_at < 0:
            return None
        start = self._starts[open_at]
        after = self._starts[open_at + 1] if open_at + 1 < len(self._starts) else _TOP
        for first, last in self._reaches:
            if first <= start < last:
                end = min(after, last)
                return (start, end, self._name(open_at)) if address < end else None
        return None

    def is_open(self, start: int) -> bool:
        """Whether the file does not say how long the function at ``start`` is."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._starts[at] == start == self._ends[at]

    def _name(self, index: int) -> str:
        return self._string(self._names[index])

    def _string(self, at: int) -> str:
        return self._strings[at : self._strings.index(b"\0", at)].decode(
            "utf-8", "backslashreplace"
        )

    def _read(self, elf: ELFFile, sections: Mapping[str, int] | None) -> None:
        self.build_id = _build_id(elf, os.path.getsize(self.path))
        table = elf.get_section_by_name(".symtab")
        if table is None or table["sh_type"] != "SHT_SYMTAB":
            raise ElfError(
                f"{self.path} has no symbols", "name a vmlinux that is not stripped, or its .debug"
            )
        bases = self._bases(elf, sections)
        self._strings = self._data(elf.get_section(table["sh_link"])) + b"\0"
        order = "<" if elf.little_endian else ">"
        rows = struct.iter_unpack(
            order + (_WIDE if elf.elfclass == 64 else _NARROW), self._data(table)
        )
        if elf.elfclass != 64:
            rows = ((row[0], row[3], row[4], row[5], row[1], row[2]) for row in rows)
        anchors = _places_of(b"_text\0", self._strings)
        found = []
        for name, info, _, section, value, size in rows:
            if name in anchors and section:
                self.anchor = value
            if info & 15 in _TYPES and section in bases and 0 < name < len(self._strings):
                start = value + bases[section]
                if start < _TOP:
                    found.append((start, size, info >> 4, name))
        self._keep(found)

    def _data(self, section: Section) -> bytes:
        """A section's bytes; a damaged file may claim more than fit into memory."""
        if section["sh_size"] > os.path.getsize(self.path):
            raise ValueError(section.name)
        data: bytes = section.data()
        return data

    def _bases(self, elf: ELFFile, sections: Mapping[str, int] | None) -> dict[int, int]:
        """What to add to a symbol's value, by the number of its section, if that holds code."""
        bases = {}
        for number, section in enumerate(elf.iter_sections()):
            if not section["sh_flags"] & _EXECUTABLE:
                continue
            if elf["e_type"] == "ET_REL":
                base = (sections or {}).get(section.name)
                if base is None:
                    continue
                bases[number] = base
                self._reaches.append((base, base + section["sh_size"]))
            else:
                bases[number] = 0
                start = section["sh_addr"]
                self._reaches.append((start, start + section["sh_size"]))
        return bases

    def _keep(self, found: list[_Row]) -> None:
        """One name for each start: the best, as kallsyms prefers them."""
        if b"\0$" in self._strings:
            # ARM's and AArch64's marks of where code and literals begin.
            found = [row for row in found if self._strings[row[3]] != _DOLLAR]
        found.sort()
        chosen = {row[0]: row for row in found}
        if len(chosen) < len(found):
            shared = {row[0] for row, after in zip(found, found[1:]) if row[0] == after[0]}
            groups: dict[int, list[_Row]] = {start: [] for start in shared}
            for row in found:
                if row[0] in shared:
                    groups[row[0]].append(row)
            for start, group in groups.items():
                (_, _, binding, name), *others = sorted(group, key=self._preference)
                self._others[start] = [row[3] for row in others]
                chosen[start] = (start, max(size for _, size, _, _ in group), binding, name)
        self._starts.extend(chosen)
        self._ends.extend([min(start + size, _TOP) for start, size, _, _ in chosen.values()])
        self._names.extend([name for _, _, _, name in chosen.values()])

    def _preference(self, row: _Row) -> tuple[bool, bool, bool, int, int, bytes]:
        _, size, binding, at = row
        name = self._strings[at : self._strings.index(b"\0", at)]
        underscores = len(name) - len(name.lstrip(b"_"))
        return not size, binding == _WEAK, binding == _LOCAL, underscores, -len(name), name


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
        found = self.file.find(linked) if 0 <= linked <= _TOP else None
        other = UNKNOWN_ADDRESS if self._behind is None else self._behind.find(address)
        if found is None:
            return other
        start, end, name = found
        if isinstance(other, Symbol) and (
            other.start > start + self.offset or self.file.is_open(start)
        ):
            return other
        return Symbol(start + self.offset, end + self.offset, name, KERNEL, None)


class Module:
    """A module's file at the addresses of its sections."""

    def __init__(self, file: ElfFile, name: str) -> None:
        self.file = file
        self.name = name

    def find(self, address: int) -> Symbol | Reason:
        """The module's function that holds the address."""
        found = self.file.find(address)
        if found is None:
            return UNKNOWN_ADDRESS
        start, end, name = found
        return Symbol(start, end, name, MODULE, self.name)


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
        yield ELFFile(file)


@contextlib.contextmanager
def refused_if_damaged(path: str) -> Iterator[None]:
    """Makes an ElfError of what is wrong with a file that is being read."""
    from elftools.common.exceptions import DWARFError, ELFError
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
    except (*wrong, *astray):
        raise ElfError(
            f"{path} is no ELF file, or a damaged one", "name a vmlinux, not a vmlinuz"
        ) from None


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
        if section["sh_type"] == "SHT_NOTE" and section["sh_size"] <= most:
            found = build_id_of(section.data())
            if found:
                return found
    return None
