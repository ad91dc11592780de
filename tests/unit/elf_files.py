"""ELF files put together by hand, byte by byte as elf(5) says."""

from __future__ import annotations

import struct
from typing import NamedTuple

NOTYPE, OBJECT, FUNC = 0, 1, 2
LOCAL, GLOBAL, WEAK = 0, 1, 2
TEXT = 0xFFFF_FFFF_8100_0000
#: Numbers of the sections.
TEXT_SECTION, DATA_SECTION = 1, 2


class Sym(NamedTuple):
    name: str
    value: int
    size: int = 0
    type: int = FUNC
    binding: int = GLOBAL
    section: int = TEXT_SECTION


def vmlinux(
    symbols: list[Sym], text_size: int = 0x10000, build_id: bytes = b"\x12\x34", type: int = 2
) -> bytes:
    """A 64-bit little-endian file with .text at TEXT (in a relocatable one at 0), no code."""
    names = [b"", b".text", b".data", b".notes", b".symtab", b".strtab", b".shstrtab"]
    strings, rows_of_table, at = [b""], [bytes(24)], 1
    for sym in symbols:
        info = sym.binding << 4 | sym.type
        row = struct.pack("<IBBHQQ", at, info, 0, sym.section, sym.value, sym.size)
        rows_of_table.append(row)
        strings.append(sym.name.encode())
        at += len(strings[-1]) + 1
    table, names_of_symbols = b"".join(rows_of_table), b"\0".join([*strings, b""])
    notes = struct.pack("<III4s", 4, len(build_id), 3, b"GNU\0") + build_id
    shstr = b"\0".join(names) + b"\0"
    places, body = [], b""
    for data in (notes, table, names_of_symbols, shstr):
        places.append((64 + len(body), len(data)))
        body += data + bytes(-len(data) % 8)
    text = TEXT if type == 2 else 0
    note, symtab, strtab, shstrtab = places
    rows = [
        (0, 0, 0, 0, 0, 0, 0, 0),
        (1, 8, 6, text, 64, text_size, 0, 0),  # NOBITS, alloc and exec
        (2, 8, 3, TEXT + 0x100_0000, 64, 0x1000, 0, 0),
        (3, 7, 2, 0, *note, 0, 0),
        (4, 2, 0, 0, *symtab, 5, 24),
        (5, 3, 0, 0, *strtab, 0, 0),
        (6, 3, 0, 0, *shstrtab, 0, 0),
    ]
    headers = b""
    for name, kind, flags, address, at, size, link, each in rows:
        where = shstr.index(names[name])
        headers += struct.pack(
            "<IIQQQQIIQQ", where, kind, flags, address, at, size, link, 1, 8, each
        )
    ident = b"\x7fELF\2\1\1" + bytes(9)
    head = struct.pack(
        "<HHIQQQIHHHHHH", type, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), 6
    )
    return ident + head + body + headers


def elf(sections: dict[str, bytes], shared: bool = False, notes: bool = False) -> bytes:
    """``vmlinux([_text])`` with more sections; each name is its own unless they are ``shared``.

    Of ``notes`` all are, and each is the whole of the first.
    """
    base = vmlinux([Sym("_text", TEXT, 0, NOTYPE)])
    at, count = struct.unpack_from("<Q", base, 40)[0], struct.unpack_from("<H", base, 60)[0]
    headers = bytearray(base[at:])
    old = struct.unpack_from("<QQ", headers, (count - 1) * 64 + 24)
    strings = base[old[0] : old[0] + old[1]]
    body = bytearray(base[:at])
    first = (0, 0)
    for number, (name, data) in enumerate(sections.items()):
        place = (len(body), len(data))
        first = place if number == 0 else first
        body += data
        where = len(strings)
        if shared and number:
            where = old[1] + number
        else:
            strings += name.encode() + b"\0"
        kind = 7 if notes else 1
        if notes:
            place = first
        headers += struct.pack("<IIQQQQIIQQ", where, kind, 0, 0, *place, 0, 0, 1, 0)
    struct.pack_into("<QQ", headers, (count - 1) * 64 + 24, len(body), len(strings))
    body += strings
    body += bytes(-len(body) % 8)
    struct.pack_into("<Q", body, 40, len(body))
    struct.pack_into("<H", body, 60, count + len(sections))
    return bytes(body + headers)
