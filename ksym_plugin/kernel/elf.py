"""The kernel image and modules as their ELF files have them: vmlinux, .debug, .ko.

What kallsyms lacks is here: how long a function is. The files are read through pyelftools,
but for the symbol table itself, of which a kernel has some 200,000 rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from itertools import groupby, islice
from operator import itemgetter, le

from ksym_plugin.kernel import cache
from ksym_plugin.kernel.identity import build_id_of, read_text
from ksym_plugin.kernel.kallsyms import ANCHORS
from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

    from ksym_plugin.timeline.packed import FunctionRow

    #: Start, size, binding, and where the name is.
    Row = tuple[int, int, int, int]

TOP = (1 << 64) - 1
_DOLLAR = 36
_LOCAL = 0
_WEAK = 2
#: How many of the names before an address are checked for reaching it.
_MOST_BACK = 128
#: Names of sections are shorter, and longer ones of symbols are cut: of a damaged file all
#: could be as long as the file is.
_LONGEST_NAME = 4096
_EXECUTABLE = 4  # SHF_EXECINSTR
_TYPES = (0, 2)  # STT_NOTYPE, STT_FUNC
_WIDE = "IBBHQQ"  # Elf64_Sym: name, info, other, section, value, size
_NARROW = "IIIBBH"  # Elf32_Sym: name, value, size, info, other, section
#: The types of the columns that the cache has of a file, between build id and strings.
_COLUMNS = "QQQIQ"
#: What pyelftools lets through, beside its own errors, where a damaged file leads it astray.
_ASTRAY = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError),
    *(TypeError, ValueError, struct.error, zlib.error),
)
_DWARF = (".debug_info", ".debug_abbrev", ".debug_line")
_ZLIB = 1  # ELFCOMPRESS_ZLIB
_SMALLEST_HEADER = 40  # Elf32_Shdr

_MODULES = "/lib/modules"
_MODULE_ENDING = ".ko"
#: The largest modules have some 10 MB, with debug information a hundred more.
_MOST_BYTES = 1 << 28
_CHUNK = 1 << 20


class ElfError(KsymError):
    """An ELF file cannot be used, or is not that of the kernel in question."""


class ElfFile:
    """The functions of one file, sorted by the addresses they were linked at.

    ``starts`` are these addresses, once for each name. ``build_id`` is in hex, None where
    there is none. ``anchors`` are the addresses that ``_text`` and ``_stext`` were linked at,
    if there are such symbols: how far one of them is from there at run time is KASLR's
    offset. Raises ElfError.
    """

    def __init__(self, path: str, sections: Mapping[str, int] | None = None) -> None:
        """``sections`` are the addresses of a module's sections, by name (/sys/module)."""
        self.path = path
        self.build_id: str | None = None
        self.anchors: dict[str, int] = {}
        with open_elf(path) as elf:
            self._read(elf, sections or {})

    @classmethod
    def cached(cls, path: str) -> ElfFile:
        """The same as ``ElfFile(path)``, sooner from the second time on (see cache)."""
        try:
            identity = cache.identity(path)
        except OSError:
            return cls(path)
        file = cls._of_parts(path, cache.load(identity, len(_COLUMNS) + 2))
        if file is None:
            file = cls(path)
            cache.store(identity, file._parts())
        return file

    @classmethod
    def _of_parts(cls, path: str, parts: list[bytes] | None) -> ElfFile | None:
        """The file that gave these parts, None if none can have given them."""
        if parts is None:
            return None
        build_id, *columns, strings = parts
        arrays = [array(code) for code in _COLUMNS]
        try:
            for column, part in zip(arrays, columns):
                column.frombytes(part)
        except ValueError:
            return None
        file = cls.__new__(cls)
        file.path = path
        file.build_id = build_id.hex() or None
        anchors, file.starts, file._ends, file._names, file._bounds = arrays
        file.anchors = {name: at for name, at in zip(ANCHORS, anchors) if at}
        file._strings = strings
        # All that look-ups rely on, whatever else the entry has.
        in_order = all(map(le, file.starts, islice(file.starts, 1, None)))
        is_sound = in_order and len(file.starts) == len(file._ends) == len(file._names)
        return file if is_sound else None

    def _parts(self) -> list[bytes]:
        """All of it in bytes, for the same kind of machine."""
        anchors = array("Q", [self.anchors.get(name, 0) for name in ANCHORS])
        columns = (anchors, self.starts, self._ends, self._names, self._bounds)
        parts = [column.tobytes() for column in columns]
        return [bytes.fromhex(self.build_id or ""), *parts, self._strings]

    def _read(self, elf: ELFFile, sections: Mapping[str, int]) -> None:
        self.build_id = _build_id(elf, os.path.getsize(self.path))
        table = elf.get_section_by_name(".symtab")
        if table is None or table["sh_type"] != "SHT_SYMTAB":
            raise ElfError(
                f"{self.path} has no symbols", "name a vmlinux that is not stripped, or its .debug"
            )
        bases, bounds = _bases(elf, sections)
        strings = self._data(elf.get_section(table["sh_link"])) + b"\0"
        # Linkers have one name be the end of a longer one.
        ends = {name: re.finditer(name.encode() + b"\0", strings) for name in ANCHORS}
        anchors = {found.start(): name for name, each in ends.items() for found in each}
        found = []
        for name, info, _, section, value, size in _symbols(elf, self._data(table)):
            if name in anchors and section:
                self.anchors[anchors[name]] = value
            if info & 15 in _TYPES and section in bases and 0 < name < len(strings):
                start = value + bases[section]
                # ARM and AArch64 mark with $ where code and literals begin.
                if start < TOP and strings[name] != _DOLLAR:
                    found.append((start, size, info >> 4, name))
        in_order = _in_order(found, strings)
        self.starts = array("Q", [row[0] for row in in_order])
        self._ends = array("Q", [min(row[0] + row[1], TOP) for row in in_order])
        # Names are where they begin in ``strings``, which end with a NUL.
        self._names = array("I", [row[3] for row in in_order])
        self._bounds = array("Q", bounds)
        self._strings = strings

    def _data(self, section: Section) -> bytes:
        """A section's bytes; a damaged file may claim more than fit into memory."""
        if max(section["sh_size"], section.data_size) > os.path.getsize(self.path):
            raise ValueError(section.name)
        data: bytes = section.data()
        return data

    def __len__(self) -> int:
        return len(self.starts)

    def find(self, address: int) -> tuple[int, int, str] | None:
        """Start, end and name of the function at a linked address, if there is one.

        A function of a known size has all bytes within it. One without, as those written
        in assembly may be, goes on to the next symbol or to the end of its section.
        """
        starts, ends = self.starts, self._ends
        after = bisect_right(starts, address)
        for index in range(after - 1, max(after - _MOST_BACK, 0) - 1, -1):
            if address < ends[index]:
                start = starts[index]
                return start, ends[index], self._name(bisect_left(starts, start))
        if not after or not self.is_open(starts[after - 1]):
            return None
        start = starts[after - 1]
        bounds = zip(self._bounds[::2], self._bounds[1::2])
        end = next((last for first, last in bounds if first <= start < last), 0)
        end = min([end, *starts[after : after + 1]])
        return (start, end, self._name(bisect_left(starts, start))) if address < end else None

    def functions(self) -> list[FunctionRow]:
        """Start, length and name of each function, aliases behind the best name."""
        rows = []
        for index, start in enumerate(self.starts):
            found = self.find(start)
            if found is not None and found[0] == start:
                rows.append((start, found[1] - start, self._name(index)))
        return rows

    def is_open(self, start: int) -> bool:
        """Whether the file does not say how long the function at ``start`` is."""
        at = bisect_left(self.starts, start)
        return at < len(self) and self.starts[at] == start == self._ends[at]

    def _name(self, index: int) -> str:
        return _string(self._strings, self._names[index]).decode("utf-8", "backslashreplace")


def _symbols(elf: ELFFile, data: bytes) -> Iterator[tuple[int, ...]]:
    """The fields of each symbol, in the order of Elf64_Sym."""
    order = "<" if elf.little_endian else ">"
    if elf.elfclass == 64:
        return struct.iter_unpack(order + _WIDE, data)
    rows = struct.iter_unpack(order + _NARROW, data)
    return ((row[0], row[3], row[4], row[5], row[1], row[2]) for row in rows)


def _in_order(rows: list[Row], strings: bytes) -> list[Row]:
    """By start; the names of one start as kallsyms prefers them, with the largest size."""
    found = []
    for start, group in groupby(sorted(rows), itemgetter(0)):
        same = list(group)
        if len(same) > 1:
            same.sort(key=lambda row: _preference(row, strings))
            size = max(row[1] for row in same)
            same = [(start, size, binding, name) for _, _, binding, name in same]
        found += same
    return found


def _preference(row: Row, strings: bytes) -> tuple[bool, bool, bool, int, int, bytes]:
    _, size, binding, at = row
    name = _string(strings, at)
    underscores = len(name) - len(name.lstrip(b"_"))
    return not size, binding == _WEAK, binding == _LOCAL, underscores, -len(name), name


def _string(strings: bytes, at: int) -> bytes:
    return strings[at : at + _LONGEST_NAME].partition(b"\0")[0]


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


def module_path(name: str, release: str, root: str = _MODULES) -> str | None:
    """The file that modprobe(8) takes for a module, None if it knows none."""
    folder = os.path.join(root, release)
    for line in read_text(os.path.join(folder, "modules.dep")).splitlines():
        path = line.partition(":")[0]
        stem = path.rpartition("/")[2].partition(_MODULE_ENDING)[0]
        if stem.replace("-", "_") == name:
            return os.path.join(folder, path)
    return None


def read_module(path: str, sections: Mapping[str, int], build_id: str | None) -> ElfFile:
    """A module's functions at the addresses of its sections.

    ``build_id`` is that of the loaded module. ElfError if the file is another's, or cannot
    be used; ImportError without pyelftools.
    """
    with _unpacked(path) as plain:
        file = ElfFile(plain, sections)
    if build_id is None or file.build_id != build_id:
        raise ElfError(f"{path} is not what was loaded")
    return file


@contextlib.contextmanager
def _unpacked(path: str) -> Iterator[str]:
    """The path of the file as it was before it was compressed."""
    if path.endswith(_MODULE_ENDING):
        yield path
        return
    with open(os.memfd_create("module", os.MFD_CLOEXEC), "wb") as file:
        _unpack(path, file.fileno())
        yield f"/proc/self/fd/{file.fileno()}"


def _unpack(path: str, fd: int) -> None:
    """Write what a file holds to ``fd``; ElfError for what cannot be unpacked here."""
    import gzip
    import lzma
    import subprocess

    try:
        if path.endswith(".zst"):
            # Python before 3.14 cannot unpack it: a program may.
            quiet, call = subprocess.DEVNULL, ["zstd", "-dcq", path]
            subprocess.run(call, stdin=quiet, stdout=fd, stderr=quiet, check=True)
        elif path.endswith((".xz", ".gz")):
            with lzma.open(path) if path.endswith(".xz") else gzip.open(path) as packed:
                parts = iter(lambda: packed.read(_CHUNK), b"")
                for part in islice(parts, _MOST_BYTES // _CHUNK):
                    os.write(fd, part)
        else:
            raise ValueError("it is packed in an unknown way")
    except (
        OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, subprocess.CalledProcessError,
    ) as error:  # fmt: skip
        raise ElfError(f"{path} cannot be unpacked ({error})") from None


@contextlib.contextmanager
def open_elf(path: str) -> Iterator[ELFFile]:
    """The file, closed at the end; what is wrong with it becomes an ElfError."""
    from elftools.common.exceptions import ELFCompressionError, ELFError
    from elftools.construct import ConstructError
    from elftools.elf.elffile import ELFFile

    try:
        with open(path, "rb") as file:
            elf = ELFFile(file)
            _check_sections(elf, os.fstat(file.fileno()).st_size)
            yield elf
    except OSError as error:
        raise ElfError(
            f"{path} cannot be read ({error.strerror})", "name a readable vmlinux"
        ) from None
    except ELFCompressionError:
        raise ElfError(
            f"{path} has sections that are compressed in a way not understood, or damaged",
            "expand them (objcopy --decompress-debug-sections) and name what that makes",
        ) from None
    except (ELFError, ConstructError, *_ASTRAY):
        raise ElfError(
            f"{path} is no ELF file, or a damaged one", "name a vmlinux, not a vmlinuz"
        ) from None


def has_dwarf(path: str) -> bool:
    """Whether a file has source lines. ElfError where not every addr2line can decompress them."""
    from elftools.common.exceptions import ELFCompressionError

    with open_elf(path) as elf:
        if elf.get_section_by_name(".zdebug_info") is not None:
            raise ELFCompressionError(".zdebug_info")
        for name in _DWARF:
            section = elf.get_section_by_name(name)
            if section is None:
                return False
            if section.compressed:
                elf.stream.seek(section["sh_offset"])
                kind = elf.stream.read(4)
                if int.from_bytes(kind, "little" if elf.little_endian else "big") != _ZLIB:
                    raise ELFCompressionError(name)
    return True


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
        if strings.find(b"\0", at, at + _LONGEST_NAME) < 0:
            raise ValueError(at)


def _bases(elf: ELFFile, sections: Mapping[str, int]) -> tuple[dict[int, int], list[int]]:
    """What to add to a symbol's value, by the number of its section, if that holds code; and
    the first and the past address of each of these, one after the other."""
    bases, bounds = {}, []
    for number, section in enumerate(elf.iter_sections()):
        if not section["sh_flags"] & _EXECUTABLE:
            continue
        base, start = 0, section["sh_addr"]
        if elf["e_type"] == "ET_REL":
            if section.name not in sections:
                continue
            base = start = sections[section.name]
        bases[number] = base
        bounds += [start, min(start + section["sh_size"], TOP)]
    return bases, bounds


def _build_id(elf: ELFFile, most: int) -> str | None:
    """From the notes, of which ``most`` bytes are read: sections may lie within one another."""
    for section in elf.iter_sections():
        if section["sh_type"] == "SHT_NOTE" and section.data_size <= most:
            most -= section.data_size
            found = build_id_of(section.data())
            if found:
                return found
    return None
