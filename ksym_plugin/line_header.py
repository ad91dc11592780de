"""The header of a line program (DWARF 2 to 5, section 6.2.4).

pyelftools' own takes the counts in it at their word, and entries of no size for some.
"""

from __future__ import annotations

from struct import unpack_from

from ksym_plugin.leb128 import unsigned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Literal, Union

    #: A string, or its form and where it is in that form's section.
    Name = Union[bytes, tuple[int, int]]
    #: What an entry tells, and the form of that.
    _Format = list[tuple[int, int]]

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
