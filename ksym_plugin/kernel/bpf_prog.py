"""The BPF programs that the kernel holds, through bpf(2): where, their names and lines.

Listing and opening programs needs CAP_SYS_ADMIN, their addresses CAP_SYSLOG as well
(unless kernel.kptr_restrict is 0) and kernel.kptr_restrict below 2. A program is held
open only while it is read; one that goes away meanwhile is left out.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from array import array

from ksym_plugin.kernel import btf, privileges, syscalls
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.packed import digest_of
from ksym_plugin.timeline.program import (
    GONE,
    HIDDEN,
    NOT_JITED,
    WITHOUT,
    ProgramDetails,
    pack_lines,
    unpack_lines,
)
from ksym_plugin.timeline.symbols import trampoline_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeVar

    from ksym_plugin.timeline.program import LineRow, LineTable
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation

    T = TypeVar("T")

#: struct bpf_prog_info (include/uapi/linux/bpf.h) up to and including attach_btf_id. It grew:
#: line_info and prog_tags came with Linux 5.0 (c454a46b5efd, c872bdb38feb), before KSYMBOL;
#: run times with 5.1 (5f8f8b93aeb8), recursion_misses with 5.12 (9ed9e9ba2337), the function
#: that is traced with 6.0 (b79c9fc9551b). An older kernel leaves the end of it alone.
_INFO_SIZE = 232
_HEAD = struct.Struct("=II8sI")  # type, id, tag, jited_prog_len
_LOADED = struct.Struct("=QI")  # load_time, created_by_uid, at 40
_NAME = slice(64, 80)
# From 104: numbers and pointers of the functions' starts and lengths; the BTF's id; size,
# pointer and number of func_info; numbers and pointers of line_info and jited_line_info,
# their record sizes; number and pointer of the tags.
_ARRAYS = struct.Struct("=IIQQIIQIIQQIIIIQ")
_COST = struct.Struct("=QQQ")  # run_time_ns, run_cnt, recursion_misses, at 192
_ATTACHED = struct.Struct("=II")  # attach_btf_obj_id, attach_btf_id, at 220
_FUNC_INFO_SIZE = 8  # insn_off, type_id
_LINE_INFO = struct.Struct("=IIII")  # insn_off, file_name_off, line_off, line_col
_LINE_SHIFT = 10
_TAG_SIZE = 8
#: Functions and lines there is room for, if any.
_FUNCTION_ROOM = 64
_LINE_ROOM = 1024
#: Packed tables in memory, for programs that are loaded again and again.
_MOST_PACKED = 256
#: BPF_STATS_RUN_TIME
_RUN_TIME = 0


class ProgramInfo:
    """The bpf_prog_info of one loaded program.

    ``load_time`` is CLOCK_MONOTONIC ns, never later than the true start of its
    BPF_PROG_LOAD. ``jited_length`` is that of the main function in bytes, 0 if it is not
    JITed. ``functions`` are (start, length) of the main program and its subprograms in the
    kernel's order, and ``tags`` theirs; empty if the program is not JITed. ``name`` is cut
    at 15 characters (BPF_OBJ_NAME_LEN). ``hidden`` says that the program has functions and
    the kernel does not show where. ``split_tag`` is the tag of the main function on its
    own, where there are others; its symbol has ``tag``, which is that of the whole program.
    ``has_btf`` says that its functions may have other names than ``name``. ``runs`` and
    ``run_ns`` are counted while somebody wants them: see ``measure``. ``misses`` counts
    how often it was not run since it was running.
    """

    __slots__ = (
        "functions", "has_btf", "hidden", "id", "jited_length", "load_time", "misses", "name",
        "run_ns", "runs", "split_tag", "tag", "tags", "type", "uid",
    )  # fmt: skip

    def __init__(
        self, id: int, type: int, tag: str, name: str, load_time: int, uid: int, hidden: bool
    ) -> None:
        self.id = id
        self.type = type
        self.tag = tag
        self.name = name
        self.load_time = load_time
        self.uid = uid
        self.hidden = hidden
        self.jited_length = 0
        self.functions: list[tuple[int, int]] = []
        self.tags: list[str] = []
        self.split_tag = tag
        self.has_btf = True
        self.run_ns = self.runs = self.misses = 0

    def __repr__(self) -> str:
        return f"ProgramInfo({self.id}, {self.tag}, {self.name}, {len(self.functions)} functions)"


def open_program(program_id: int) -> int:
    """A descriptor that holds a program; -1 if it is gone. SourceError if bpf(2) is refused."""
    try:
        return syscalls.bpf(syscalls.PROG_GET_FD_BY_ID, array("I", (program_id, 0, 0, 0)))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return -1
        raise privileges.bpf_refusal(error) from error


def _with_program(program_id: int, read: Callable[[int], T]) -> T | None:
    """What ``read`` returns for a descriptor of a program; None if it is gone."""
    fd = open_program(program_id)
    if fd < 0:
        return None
    try:
        return read(fd)
    finally:
        os.close(fd)


def measure() -> int:
    """Have the kernel count run times of all programs while the descriptor is open."""
    return syscalls.bpf(syscalls.ENABLE_STATS, array("I", (_RUN_TIME,)))


def plain_names(program: ProgramInfo) -> list[str]:
    """The kernel's names of the functions of a program without BTF."""
    # bpf_get_prog_name() in kernel/bpf/core.c; a subprogram's own name is "F".
    names = [program.name, *["F"] * len(program.tags)]
    return [
        f"bpf_prog_{tag}_{name}" if name else f"bpf_prog_{tag}"
        for tag, name in zip(program.tags, names)
    ]


class ProgramReader:
    """Reads programs one after the other; the buffers stay, and grow.

    All methods raise SourceError where bpf(2) is refused.
    """

    def __init__(self) -> None:
        self._info = array("B", bytes(_INFO_SIZE))
        self._make_room(_FUNCTION_ROOM, 0)
        self._btf: tuple[int, bytes] = (0, b"")
        self._targets = btf.Targets()
        self._packed: dict[tuple[bytes, ...], tuple[bytes, bytes]] = {}

    def ids(self, after: int = 0) -> Iterator[int]:
        """The ids above ``after``, ascending, without opening anything."""
        attr = array("I", (after, 0, 0, 0))
        while True:
            try:
                syscalls.bpf(syscalls.PROG_GET_NEXT_ID, attr)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return
                raise privileges.bpf_refusal(error) from error
            found = attr[1]
            yield found
            attr[0] = found

    def newer_than(self, after: int) -> Iterator[ProgramInfo]:
        """The programs with ids above ``after``: what was loaded since, until ids wrap."""
        # To the end first: what loads meanwhile must not keep the walk going for ever.
        yield from self.by_id(list(self.ids(after)))

    def by_id(self, program_ids: Iterable[int]) -> Iterator[ProgramInfo]:
        """Those of the programs that are still there."""
        for program_id in program_ids:
            found = self.program(program_id)
            if found is not None:
                yield found

    def program(self, program_id: int) -> ProgramInfo | None:
        """One program; None if it is gone."""
        return _with_program(program_id, self.info)

    def info(self, fd: int) -> ProgramInfo:
        """The program that ``fd`` holds."""
        return self._parse(self._read_info(fd, False))

    def function_names(self, program_id: int) -> list[str]:
        """The kernel's names of a program's functions, as kallsyms has them.

        From bpf(2) and the program's BTF, so also where kallsyms does not list programs
        (net.core.bpf_jit_kallsyms = 0). A name that is not known is ``""``; the list is
        empty if the program is gone.
        """
        found = _with_program(program_id, lambda fd: self._read_info(fd, False))
        return [] if found is None else self._names(self._parse(found), found)

    def details(self, program_id: int, fd: int = -1) -> ProgramDetails:
        """A program with its names and lines; ``fd`` holds it already, or it is looked for."""
        if fd >= 0:
            return self._details(fd)
        return _with_program(program_id, self._details) or ProgramDetails(program_id, GONE)

    def _details(self, fd: int) -> ProgramDetails:
        # Its BTF may go with the program, which is held until all is read.
        found = self._read_info(fd, True)
        info = self._parse(found)
        details = ProgramDetails(info.id, "")
        details.type, details.tag, details.uid = info.type, info.tag, info.uid
        details.load_time = info.load_time
        holder, type_id = _ATTACHED.unpack_from(self._info, 220)
        key = holder << 32 | btf.IN_BTF | type_id
        if type_id and self._targets.name(key):
            details.trampoline, details.target = key, self._targets.name(key)
        if not info.jited_length:
            details.problem = NOT_JITED
        elif info.hidden:
            details.problem = HIDDEN
        else:
            self._add_functions(details, info, found)
        return details

    def _add_functions(self, details: ProgramDetails, info: ProgramInfo, found: _Arrays) -> None:
        details.functions = [
            (start, length, name)
            for (start, length), name in zip(info.functions, self._names(info, found))
        ]
        blob = self._btf_of(found.btf_id)
        rows = min(found.lines, found.jited_lines)
        if not blob or not rows or not found.jited_lines_at:
            details.problem = WITHOUT
            return
        records = bytes(memoryview(self._lines)[: _LINE_INFO.size * rows])
        offsets = rows_of(info.functions, self._addresses[:rows].tolist())
        lengths = array("I", [length for _, length in info.functions])
        key = (records, array("I", [at for _, at in offsets]).tobytes(), lengths.tobytes(), blob)
        if key not in self._packed:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            table = pack_lines(rows_with_lines(records, offsets, len(lengths), blob))
            self._packed[key] = (table, digest_of(table))
        details.lines, details.digest = self._packed[key]

    def _names(self, info: ProgramInfo, found: _Arrays) -> list[str]:
        """As the kernel makes them: see bpf_get_prog_name() in kernel/bpf/core.c."""
        if not found.func_infos:
            return plain_names(info)
        type_ids = self._func_infos[1 : 2 * found.func_infos : 2].tolist()
        names = btf.function_names(self._btf_of(found.btf_id), type_ids)
        full = [names.get(type_id, "") for type_id in type_ids]
        full += ["F"] * (len(info.tags) - len(full))
        return [f"bpf_prog_{tag}_{name}" if name else "" for tag, name in zip(info.tags, full)]

    def _btf_of(self, btf_id: int) -> bytes:
        """A BTF object's bytes, none where it may not be read. Programs of a file share one."""
        if not btf_id or self._btf[0] == btf_id:
            return self._btf[1] if btf_id else b""
        blob = btf.read(btf_id)
        if blob:  # What failed may work the next time.
            self._btf = (btf_id, blob)
        return blob

    def _make_room(self, functions: int, lines: int) -> None:
        self._starts = array("Q", bytes(8 * functions))
        self._lengths = array("I", bytes(4 * functions))
        self._func_infos = array("I", bytes(_FUNC_INFO_SIZE * functions))
        self._tags = array("B", bytes(_TAG_SIZE * functions))
        self._lines = array("B", bytes(_LINE_INFO.size * lines))
        self._addresses = array("Q", bytes(8 * lines))

    def _read_info(self, fd: int, with_lines: bool) -> _Arrays:
        """Fill the buffers; once more if the program has more than they hold."""
        while True:
            functions = len(self._starts)
            lines = len(self._addresses) if with_lines else 0
            starts, lengths, func_infos, rows, addresses, tags = (
                buffer.buffer_info()[0]
                for buffer in (
                    self._starts, self._lengths, self._func_infos,
                    self._lines, self._addresses, self._tags,
                )
            )  # fmt: skip
            self._info[:] = array("B", bytes(_INFO_SIZE))
            _ARRAYS.pack_into(
                self._info, 104,
                functions, functions, starts, lengths,
                0, _FUNC_INFO_SIZE, func_infos, functions,
                lines, rows, addresses, lines, _LINE_INFO.size, 8,
                functions, tags,
            )  # fmt: skip
            try:
                syscalls.object_info(fd, self._info)
            except OSError as error:
                raise privileges.bpf_refusal(error) from error
            found = _Arrays(self._info)
            most = max(found.functions, found.func_infos)
            most_lines = max(found.lines, found.jited_lines) if with_lines else 0
            if most <= functions and most_lines <= lines:
                return found
            self._make_room(max(most, functions), max(most_lines, lines, _LINE_ROOM))

    def _parse(self, found: _Arrays) -> ProgramInfo:
        info = self._info
        type_, program_id, tag, jited = _HEAD.unpack_from(info, 0)
        load_time, uid = _LOADED.unpack_from(info, 40)
        name = info[_NAME].tobytes().split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
        # Blanked: the kernel clears the pointer (kptr_restrict) or the numbers (no CAP_BPF),
        # and leaves what was in the buffer before.
        hidden = bool(found.functions and not found.starts_at and jited)
        program = ProgramInfo(
            program_id, type_, tag.hex(), name, load_time - boottime_ahead(), uid, hidden
        )
        program.jited_length = jited
        program.run_ns, program.runs, program.misses = _COST.unpack_from(info, 192)
        program.has_btf = bool(found.func_infos)
        tags = self._tags.tobytes()
        for at in range(found.functions if found.starts_at else 0):
            start, length = self._starts[at], self._lengths[at]
            # A program that is not JITed has the interpreter's address and no length.
            if start and length:
                program.functions.append((start, length))
                program.tags.append(tags[_TAG_SIZE * at : _TAG_SIZE * (at + 1)].hex())
        if program.tags:
            program.split_tag, program.tags[0] = program.tags[0], program.tag
        return program


class _Arrays:
    """The numbers and pointers that the kernel left in a bpf_prog_info."""

    __slots__ = (
        "btf_id", "func_infos", "functions", "jited_lines", "jited_lines_at", "lines", "starts_at",
    )  # fmt: skip

    def __init__(self, info: array[int]) -> None:
        starts, lengths, self.starts_at, _, self.btf_id, *more = _ARRAYS.unpack_from(info, 104)
        _, _, self.func_infos, self.lines, _, self.jited_lines_at, self.jited_lines = more[:7]
        self.functions = min(starts, lengths)


def boottime_ahead() -> int:
    """At least how far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC, in ns.

    The greatest value that the readings allow, so that a time converted with it is never
    later than the true one. Suspending makes it grow.
    """
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - monotonic


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
    texts = {at: "" for _, *both, _ in _LINE_INFO.iter_unpack(records) for at in both}
    for at in texts:
        texts[at] = btf.string(strings, at) if at < len(strings) else ""
    rows: list[list[LineRow]] = [[] for _ in range(functions)]
    for (_, file, text, place), (function, offset) in zip(_LINE_INFO.iter_unpack(records), offsets):
        if function >= 0:
            line = place >> _LINE_SHIFT  # Below it is the column.
            rows[function].append((offset, line, texts[file], texts[text].strip()))
    for function_rows in rows:
        function_rows.sort(key=lambda row: row[0])
    return rows


class LiveLines:
    """Targets and source lines of what is loaded now; each program is read once."""

    def __init__(self) -> None:
        self._reader = ProgramReader()
        self._targets = btf.Targets()
        self._known: dict[int, tuple[list[int], LineTable, str | None]] = {}

    def traced(self, lifetime: Lifetime, /) -> str | None:
        """The kernel function that a trampoline belongs to."""
        key = trampoline_key(lifetime.symbol.name)
        return None if key is None else self._targets.name(key) or None

    def line(self, lifetime: Lifetime, offset: int, /) -> SourceLocation | None:
        """The source line of the instruction at an offset into a symbol."""
        starts, table, _ = self._read(lifetime)
        start = lifetime.symbol.start
        return table.find(starts.index(start), offset) if start in starts else None

    def program_name(self, lifetime: Lifetime, /) -> str | None:
        """The name of the main function of the program that a function is part of."""
        return self._read(lifetime)[2]

    def _read(self, lifetime: Lifetime) -> tuple[list[int], LineTable, str | None]:
        prog_id = lifetime.prog_id
        if prog_id in self._known:
            return self._known[prog_id]
        try:
            details = None if prog_id is None else self._reader.details(prog_id)
        except SourceError:
            details = None
        if prog_id is None or details is None:
            return [], unpack_lines(b""), None
        starts = [start for start, _, _ in details.functions]
        name = details.functions[0][2] if starts else None
        self._known[prog_id] = known = (starts, unpack_lines(details.lines), name or None)
        return known
