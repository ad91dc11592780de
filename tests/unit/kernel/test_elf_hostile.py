"""ELF files made to take more time and memory than they have bytes.

Each has a few hundred kilobytes, of which a reader that believes it makes gigabytes, or
which it reads for minutes: it is read or refused by a process with bounds.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import zlib

import pytest

from tests.unit.elf_files import NOTYPE, TEXT, Sym, elf, vmlinux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

SECONDS, BYTES = 30, 1 << 30
SIZE = 300_000
READ = """
import sys
from ksym_plugin.kernel.elf import ElfError, ElfFile, Image
from ksym_plugin.kernel.dwarf import ImageLines
try:
    image = Image(ElfFile(sys.argv[1]), int(sys.argv[2]), None)
    lines = ImageLines(image)
    for at in range(int(sys.argv[3])):
        lines.line(int(sys.argv[2]) + at * 16)
    for start in image.file.starts:
        image.file.aliases(start)
except ElfError as error:
    print(error)
else:
    print("read")
"""


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def read(path: Path, content: bytes, addresses: int) -> str:
    """What is said of a file when lines of so many addresses are asked for."""
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(TEXT), str(addresses)],
        env={"PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(path.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        preexec_fn=bounded,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def uleb(value: int) -> bytes:
    made = b""
    while value > 127:
        made += bytes([value & 127 | 128])
        value >>= 7
    return made + bytes([value])


def line_header(version: int, tables: bytes, opcodes: bytes, claimed: int = 0) -> bytes:
    """A line program of 32-bit DWARF; ``claimed`` is what it says of its length."""
    fixed = bytes([1, 1, 1, 0xFB, 14, 13]) + bytes([0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1])
    rest = fixed + tables
    sizes = b"\x08\x00" if version == 5 else b""
    after = struct.pack("<H", version) + sizes + struct.pack("<I", len(rest)) + rest + opcodes
    return struct.pack("<I", claimed or len(after)) + after


#: Tables of one directory and one file, which DWARF 5 has twice.
V5 = bytes([1, 1, 8, 1]) + b"/src\0" + bytes([2, 1, 8, 2, 0x0B, 2]) + b"a.c\0\0" * 2
V4 = b"\0" + b"a.c\0\0\0\0" + b"\0"
SET = b"\0\x09\2" + struct.pack("<Q", TEXT)
END = b"\0\1\1"
ROWS = SET + b"\x20" * 200 + END


def unit(abbrev: int, body: bytes, version: int = 4) -> bytes:
    if version == 5:
        rest = struct.pack("<HBBI", 5, 1, 8, abbrev) + body
    else:
        rest = struct.pack("<HIB", version, abbrev, 8) + body
    return struct.pack("<I", len(rest)) + rest


#: DW_TAG_compile_unit with DW_AT_stmt_list, low_pc and high_pc (data8).
ABBREV = bytes([1, 0x11, 0, 0x10, 0x17, 0x11, 1, 0x12, 7, 0, 0, 0])


def body(line_offset: int, low: int, size: int) -> bytes:
    return b"\1" + struct.pack("<IQQ", line_offset, low, size)


def debugged(**sections: bytes) -> bytes:
    plain = {
        ".debug_info": unit(0, body(0, TEXT, 0x10000)),
        ".debug_abbrev": ABBREV,
        ".debug_line": line_header(5, V5, ROWS),
    }
    return elf({**plain, **{f".{name}": data for name, data in sections.items()}})


def entries_without_size() -> bytes:
    tables = b"\0" + uleb(1 << 60) + b"\0\0"
    return debugged(debug_line=line_header(5, tables, ROWS))


def files_with_one_endless_name() -> bytes:
    count = SIZE // 5
    tables = bytes([1, 1, 8, 1]) + b"/src\0" + bytes([2, 1, 0x1F, 2, 0x0B]) + uleb(count)
    rows = b"".join(b"\4" + uleb(number) + b"\x20" for number in range(4000))
    program = SET + rows + END
    return debugged(
        debug_line=line_header(5, tables + bytes(5 * count), program),
        debug_line_str=b"x" * SIZE + b"\0",
    )


def an_endless_address() -> bytes:
    wide = b"\0" + uleb(SIZE + 1) + b"\2" + b"\xff" * SIZE
    return debugged(debug_line=line_header(5, V5, wide + b"\x20" * SIZE + END))


def programs_within_programs() -> bytes:
    count = 3000
    size = len(line_header(4, V4, b""))
    line = b"".join(
        line_header(4, V4, b"", claimed=SIZE + (count - number) * size - 4)
        for number in range(count)
    )
    units = b"".join(
        unit(0, body(number * size, TEXT + 16 * number, 16)) for number in range(count)
    )
    return debugged(debug_info=units, debug_line=line + SET + b"\x20" * SIZE)


def one_program_of_many_units() -> bytes:
    count = 3000
    units = b"".join(unit(0, body(0, TEXT + 16 * number, 16)) for number in range(count))
    program = line_header(4, V4, SET + b"\x20" * SIZE + END)
    return debugged(debug_info=units, debug_line=program)


def sets_within_sets() -> bytes:
    one = struct.pack("<IHIBBI", 12, 2, 0, 8, 0, 0x1111)
    return debugged(debug_aranges=one * (SIZE // len(one)) + bytes(64))


def tables_within_tables() -> bytes:
    declaration = b"\2\x11\0\0\0"
    count = SIZE // 24
    units = b"".join(unit(number * 5, b"\1" + bytes(8)) for number in range(count))
    return debugged(debug_info=units, debug_abbrev=declaration * count + ABBREV)


def constants_without_size() -> bytes:
    pairs = b"".join(uleb(0x2000 + number) + b"\x19" for number in range(SIZE // 3))
    units = unit(0, b"\1") * (SIZE // 12)
    return debugged(debug_info=units, debug_abbrev=b"\1\x11\0" + pairs + b"\0\0\0")


def lists_within_lists() -> bytes:
    abbrev = bytes([1, 0x11, 0, 0x55, 0x17, 0, 0, 0])
    pairs = struct.pack("<QQ", (1 << 64) - 1, 8) * (SIZE // 16) + bytes(16)
    units = b"".join(unit(0, b"\1" + struct.pack("<I", 16 * number)) for number in range(10_000))
    return debugged(debug_info=units, debug_abbrev=abbrev, debug_ranges=pairs)


def blocks_beyond_their_units() -> bytes:
    abbrev = bytes([1, 0x11, 0, 0x1B, 0x04, 0, 0, 0])
    units = unit(0, b"\1" + struct.pack("<I", SIZE // 3)) * (SIZE // 16)
    return debugged(debug_info=units, debug_abbrev=abbrev)


def units_within_units() -> bytes:
    abbrev = bytes([1, 0x11, 0, 0x1B, 0x04, 0, 0, 0])
    one = struct.pack("<IHIB", SIZE, 4, 0, 8) + b"\1" + struct.pack("<I", SIZE // 3)
    count = SIZE // 2 // len(one)
    sets = b"".join(
        struct.pack("<IHIBBIQQQQ", 44, 2, number * len(one), 8, 0, 0, TEXT + 16 * number, 16, 0, 0)
        for number in range(count)
    )
    units = one * count + bytes(SIZE + 4 - len(one) * count)
    return debugged(debug_info=units, debug_abbrev=abbrev, debug_aranges=sets)


def compressed_to_nothing() -> bytes:
    line = line_header(5, V5, SET + b"\x20" * (1000 * SIZE // 2) + END)
    packed = struct.pack("<IIQQ", 1, 0, len(line), 1) + zlib.compress(line, 9)
    return debugged(debug_line=packed)


def names_within_names() -> bytes:
    count = SIZE // 24
    symbols = [Sym("_text", TEXT, 0, NOTYPE)]
    whole = bytearray(vmlinux(symbols + [Sym("x" * 23, TEXT + 64, 8)] * count))
    # All names in one: what ended them goes, but for the last.
    start = whole.index(b"x" * 23)
    end = whole.rindex(b"x" * 23)
    whole[start:end] = whole[start:end].replace(b"\0", b"x")
    return bytes(whole)


def sections_without_size() -> bytes:
    """The number of sections is the size that the first one claims."""
    whole = bytearray(vmlinux([Sym("_text", TEXT, 0, NOTYPE)]))
    headers = struct.unpack_from("<Q", whole, 40)[0]
    struct.pack_into("<H", whole, 60, 0)
    struct.pack_into("<Q", whole, headers + 32, 1 << 60)
    return bytes(whole)


def sections_with_one_endless_name() -> bytes:
    return elf(
        {"." + "y" * SIZE: b"", **{f".{number}": b"" for number in range(3000)}}, shared=True
    )


def notes_within_notes() -> bytes:
    notes = struct.pack("<III", 0, 0, 1) * (SIZE // 12)
    return elf({".note": notes, **{f".note{number}": b"" for number in range(3000)}}, notes=True)


@pytest.mark.parametrize(
    "make",
    [
        entries_without_size,
        files_with_one_endless_name,
        an_endless_address,
        programs_within_programs,
        one_program_of_many_units,
        sets_within_sets,
        tables_within_tables,
        constants_without_size,
        lists_within_lists,
        blocks_beyond_their_units,
        units_within_units,
        compressed_to_nothing,
        names_within_names,
        sections_without_size,
        sections_with_one_endless_name,
        notes_within_notes,
    ],
)
def test_what_is_endless_is_bounded(make: object, tmp_path: Path) -> None:
    content = make()  # type: ignore[operator]
    assert len(content) < 8 * SIZE
    said = read(tmp_path / "vmlinux", content, 3000)
    assert said == "read\n" or "damaged" in said or "compressed" in said


def test_a_file_put_together_by_hand_has_its_line(tmp_path: Path) -> None:
    """Else the files here could all be refused for the wrong reason."""
    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.elf import ElfFile, Image

    for version, tables in ((5, V5), (4, V4), (2, V4)):
        line = line_header(5, V5, ROWS) if version == 5 else plain(version, tables)
        path = tmp_path / f"vmlinux{version}"
        path.write_bytes(debugged(debug_line=line))
        lines = ImageLines(Image(ElfFile(str(path)), TEXT, None))
        found = lines.line(TEXT + 5)
        lines.close()
        assert found is not None
        assert found.file.endswith("a.c")


def plain(version: int, tables: bytes) -> bytes:
    made = line_header(4, tables, ROWS)
    if version == 4:
        return made
    # Before DWARF 4 there is no word on how many operations an instruction has.
    without = made[10:11] + made[12:]
    after = struct.pack("<H", version) + struct.pack("<I", len(without) - len(ROWS)) + without
    return struct.pack("<I", len(after)) + after
