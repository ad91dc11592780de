"""Source lines of the programs that are loaded now, and what is traced now."""

from __future__ import annotations

import errno
import os
import struct
from array import array

from ksym_plugin.kernel import btf, syscalls
from ksym_plugin.kernel.bpf_prog import boottime_ahead
from ksym_plugin.kernel.btf import IN_BTF, Targets
from ksym_plugin.timeline.line_table import pack_lines, unpack_lines
from ksym_plugin.timeline.program import GONE, HIDDEN, NOT_JITED, WITHOUT, ProgramDetails
from ksym_plugin.timeline.symbols import trampoline_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ksym_plugin.timeline.line_table import LineRow, LineTable
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation

#: struct bpf_prog_info up to and including attach_btf_id; the kernel fills in what it knows.
_INFO_SIZE = 232
_HEAD = struct.Struct("=II8sI")  # type, id, tag, jited_prog_len
_LOADED = struct.Struct("=QI")  # load_time, created_by_uid, at 40
_NAME = slice(64, 80)
# From 104: numbers and pointers of the functions' starts and lengths; the BTF's id; size,
# pointer and number of func_info; numbers and pointers of line_info and jited_line_info,
# their record sizes; number and pointer of the tags.
_ARRAYS = struct.Struct("=IIQQIIQIIQQIIIIQ")
_ATTACHED = struct.Struct("=II")  # attach_btf_obj_id, attach_btf_id, at 220
_BTF_INFO = struct.Struct("=QI20x")  # btf, btf_size of struct bpf_btf_info
_FUNC_INFO = struct.Struct("=II")  # insn_off, type_id
_LINE_INFO = struct.Struct("=IIII")  # insn_off, file_name_off, line_off, line_col
_TAG_SIZE = 8
#: Functions and lines there is room for at the first try.
_FUNCTION_ROOM = 64
_LINE_ROOM = 1024
_LINE_SHIFT = 10
#: Packed tables that are kept, for programs that are loaded again and again.
_MOST_KEPT = 256


class Reader:
    """Reads programs one after the other; buffers and recent tables are kept."""

    def __init__(self) -> None:
        self._attr = array("I", bytes(16))
        self._info = array("B", bytes(_INFO_SIZE))
        self._make_room(_FUNCTION_ROOM, _LINE_ROOM)
        self._btf: tuple[int, bytes] = (0, b"")
        self._targets = Targets()
        self._kept: dict[tuple[bytes, ...], tuple[bytes, bytes]] = {}

    def read(self, prog_id: int) -> ProgramDetails:
        """One program by its id."""
        fd = open_program(prog_id)
        if fd < 0:
            return ProgramDetails(prog_id, GONE)
        try:
            return self.read_open(prog_id, fd)
        finally:
            os.close(fd)

    def read_open(self, prog_id: int, fd: int) -> ProgramDetails:
        """One program that ``fd`` holds. OSError where bpf(2) is refused."""
        self._ask(fd)
        details = ProgramDetails(prog_id, "")
        details.type, _, tag, jited = _HEAD.unpack_from(self._info, 0)
        load_time, details.uid = _LOADED.unpack_from(self._info, 40)
        details.tag = tag.hex()
        details.load_time = load_time - boottime_ahead()
        holder, type_id = _ATTACHED.unpack_from(self._info, 220)
        key = holder << 32 | IN_BTF | type_id
        if type_id and self._targets.name(key):
            details.trampoline, details.target = key, self._targets.name(key)
        found = _Arrays(self._info)
        if not jited:
            details.problem = NOT_JITED
        elif found.functions and not found.starts_at:
            # The kernel clears the pointer, and leaves what was in the buffer before.
            details.problem = HIDDEN
        else:
            self._fill(details, found)
        return details

    def _fill(self, details: ProgramDetails, found: _Arrays) -> None:
        blob = self._btf_of(found.btf_id) if found.btf_id else b""
        tags = [details.tag, *self._tags_of(found.functions)[1:]]
        starts, lengths = self._starts[: found.functions], self._lengths[: found.functions]
        names = self._names(found, blob, tags)
        details.functions = list(zip(starts, lengths, names))
        rows = min(found.lines, found.jited_lines)
        if not blob or not rows or not found.jited_lines_at:
            details.problem = WITHOUT
            return
        records = bytes(memoryview(self._lines)[: _LINE_INFO.size * rows])
        offsets = rows_of(list(zip(starts, lengths)), self._addresses[:rows].tolist())
        key = (records, array("I", [at for _, at in offsets]).tobytes(), lengths.tobytes(), blob)
        details.lines, details.digest = self._packed(key, records, offsets, found.functions, blob)

    def _packed(
        self,
        key: tuple[bytes, ...],
        records: bytes,
        offsets: list[tuple[int, int]],
        functions: int,
        blob: bytes,
    ) -> tuple[bytes, bytes]:
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            made = pack_lines(rows_with_lines(records, offsets, functions, blob))
            known = self._kept[key] = (made, digest_of(made))
        return known

    def _names(self, found: _Arrays, blob: bytes, tags: list[str]) -> list[str]:
        """As the kernel spells them: see bpf_get_prog_name() in kernel/bpf/core.c."""
        own = self._info[_NAME].tobytes().split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
        plain = [own, *["F"] * (found.functions - 1)]
        if found.func_infos:
            data = memoryview(self._func_infos)[: _FUNC_INFO.size * found.func_infos]
            type_ids = [type_id for _, type_id in _FUNC_INFO.iter_unpack(data)]
            full = btf.function_names(blob, type_ids)
            plain[: len(type_ids)] = [full.get(type_id, "") for type_id in type_ids]
            return [f"bpf_prog_{tag}_{name}" if name else "" for tag, name in zip(tags, plain)]
        return [
            f"bpf_prog_{tag}_{name}" if name else f"bpf_prog_{tag}"
            for tag, name in zip(tags, plain)
        ]

    def _tags_of(self, number: int) -> list[str]:
        data = self._tags.tobytes()
        return [data[at : at + _TAG_SIZE].hex() for at in range(0, _TAG_SIZE * number, _TAG_SIZE)]

    def _make_room(self, functions: int, lines: int) -> None:
        self._room = (functions, lines)
        self._starts = array("Q", bytes(8 * functions))
        self._lengths = array("I", bytes(4 * functions))
        self._func_infos = array("B", bytes(_FUNC_INFO.size * functions))
        self._tags = array("B", bytes(_TAG_SIZE * functions))
        self._lines = array("B", bytes(_LINE_INFO.size * lines))
        self._addresses = array("Q", bytes(8 * lines))

    def _ask(self, fd: int) -> None:
        """Fill the buffers; once more if the program has more than they hold."""
        while True:
            functions, lines = self._room
            at = [
                buffer.buffer_info()[0]
                for buffer in (self._starts, self._lengths, self._func_infos, self._lines)
            ]
            jited, tags = self._addresses.buffer_info()[0], self._tags.buffer_info()[0]
            self._info[:] = array("B", bytes(_INFO_SIZE))
            _ARRAYS.pack_into(
                self._info, 104,
                functions, functions, at[0], at[1],
                0, _FUNC_INFO.size, at[2], functions,
                lines, at[3], jited, lines, _LINE_INFO.size, 8,
                functions, tags,
            )  # fmt: skip
            self._get_info(fd, self._info)
            found = _Arrays(self._info)
            wanted = (max(found.functions, found.func_infos), max(found.lines, found.jited_lines))
            if wanted[0] <= functions and wanted[1] <= lines:
                return
            self._make_room(max(wanted[0], functions), max(wanted[1], lines))

    def _btf_of(self, btf_id: int) -> bytes:
        """A BTF object's bytes, none where it may not be read. Programs of a file share one."""
        if self._btf[0] == btf_id:
            return self._btf[1]
        try:
            fd = syscalls.bpf(syscalls.BTF_GET_FD_BY_ID, array("I", (btf_id, 0, 0, 0)))
        except OSError:
            return b""
        try:
            info = array("B", bytes(_BTF_INFO.size))
            self._get_info(fd, info)
            (_, size) = _BTF_INFO.unpack_from(info)
            blob = array("B", bytes(size))
            info[:] = array("B", _BTF_INFO.pack(blob.buffer_info()[0], size))
            self._get_info(fd, info)
        finally:
            os.close(fd)
        self._btf = (btf_id, blob.tobytes())
        return self._btf[1]

    def _get_info(self, fd: int, info: array[int]) -> None:
        self._attr[:] = array("I", struct.pack("=IIQ", fd, len(info), info.buffer_info()[0]))
        syscalls.bpf(syscalls.OBJ_GET_INFO_BY_FD, self._attr)


class _Arrays:
    """The numbers and pointers that the kernel left in a bpf_prog_info."""

    __slots__ = (
        "btf_id", "func_infos", "functions", "jited_lines", "jited_lines_at", "lines", "starts_at",
    )  # fmt: skip

    def __init__(self, info: array[int]) -> None:
        (starts, lengths, self.starts_at, _, self.btf_id, _, _, self.func_infos, self.lines) = (
            _ARRAYS.unpack_from(info, 104)[:9]
        )
        self.jited_lines_at, self.jited_lines = _ARRAYS.unpack_from(info, 104)[10:12]
        self.functions = min(starts, lengths)


def open_program(prog_id: int) -> int:
    """A descriptor that holds a program; -1 if it is gone. OSError where bpf(2) is refused."""
    try:
        return syscalls.bpf(syscalls.PROG_GET_FD_BY_ID, array("I", (prog_id, 0, 0, 0)))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return -1
        raise


def rows_of(functions: list[tuple[int, int]], addresses: list[int]) -> list[tuple[int, int]]:
    """For each row's address the number of the function that holds it, and the offset there.

    ``functions`` are (start, length). (-1, 0) for an address outside of all of them.
    """
    found = []
    last = 0
    for address in addresses:
        # Rows are in program order: most are in the function that the one before is in.
        for number in (last, *range(len(functions))):
            start, length = functions[number]
            if start <= address < start + length:
                found.append((number, address - start))
                last = number
                break
        else:
            found.append((-1, 0))
    return found


def rows_with_lines(
    records: bytes, offsets: list[tuple[int, int]], functions: int, blob: bytes
) -> list[list[LineRow]]:
    """Each function's rows, by offset, from bpf_line_info records and the program's BTF."""
    _, strings = btf.sections(blob)
    told = _remembering(strings)
    rows: list[list[LineRow]] = [[] for _ in range(functions)]
    for (_, file, text, place), (function, offset) in zip(_LINE_INFO.iter_unpack(records), offsets):
        if function >= 0:
            line = place >> _LINE_SHIFT  # Below it is the column.
            rows[function].append((offset, line, told(file), told(text).strip()))
    for function_rows in rows:
        function_rows.sort(key=lambda row: row[0])
    return rows


def _remembering(strings: bytes) -> Callable[[int], str]:
    known: dict[int, str] = {}

    def told(at: int) -> str:
        text = known.get(at)
        if text is None:
            text = known[at] = btf.string(strings, at) if at < len(strings) else ""
        return text

    return told


def digest_of(packed: bytes) -> bytes:
    """What tells one table from another."""
    from hashlib import blake2b

    return blake2b(packed, digest_size=16).digest()


class LiveLines:
    """Asks the running kernel by bpf(2), once a program."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._targets = Targets()
        self._known: dict[int, tuple[list[int], LineTable]] = {}

    def traced(self, lifetime: Lifetime, /) -> str | None:
        """The kernel function whose calls a trampoline takes to programs."""
        key = trampoline_key(lifetime.symbol.name)
        return None if key is None else self._targets.name(key) or None

    def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation | None:
        """The source line of the instruction at an offset into a symbol."""
        if lifetime.prog_id is None:
            return None
        starts, table = self._known.get(lifetime.prog_id) or self._read(lifetime.prog_id)
        start = lifetime.symbol.start
        return table.find(starts.index(start), offset) if start in starts else None

    def _read(self, prog_id: int) -> tuple[list[int], LineTable]:
        try:
            details = self._reader.read(prog_id)
        except OSError:
            return [], unpack_lines(b"")
        starts = [start for start, _, _ in details.functions]
        self._known[prog_id] = known = (starts, unpack_lines(details.lines))
        return known
