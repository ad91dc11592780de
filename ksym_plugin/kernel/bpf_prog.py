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
from bisect import bisect_right

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
    from typing import Any, TypeVar

    from ksym_plugin.timeline.program import LineRow, LineTable
    from ksym_plugin.timeline.symbols import Lifetime, SourceLocation

    T = TypeVar("T")

#: struct bpf_prog_info (include/uapi/linux/bpf.h) up to and including attach_btf_id. It grew:
#: line_info and prog_tags came with Linux 5.0 (c454a46b5efd, c872bdb38feb), before KSYMBOL;
#: run times with 5.1 (5f8f8b93aeb8), recursion_misses with 5.12 (9ed9e9ba2337), the function
#: that is traced with 6.0 (b79c9fc9551b). An older kernel leaves the end of it alone.
_INFO = struct.Struct(
    "="
    "II8sI20x"  # type, id, tag, jited_prog_len
    "QI12x16s24x"  # load_time, created_by_uid, name
    "IIQQ"  # nr_jited_ksyms, nr_jited_func_lens, jited_ksyms, jited_func_lens
    "IIQI"  # btf_id, func_info_rec_size, func_info, nr_func_info
    "IQQIII"  # nr_line_info, line_info, jited_line_info, its number, their record sizes
    "IQ"  # nr_prog_tags, prog_tags
    "QQQ4x"  # run_time_ns, run_cnt, recursion_misses
    "II4x"  # attach_btf_obj_id, attach_btf_id
)
_FUNC_INFO_SIZE = 8  # insn_off, type_id
_LINE_INFO = struct.Struct("=IIII")  # insn_off, file_name_off, line_off, line_col
_LINE_SHIFT = 10
_TAG_SIZE = 8
#: Functions and lines there is room for, if any.
_FUNCTION_ROOM = 64
_LINE_ROOM = 1024
#: Packed tables in memory, for programs that are loaded again and again.
_MOST_PACKED = 256


class ProgramInfo:
    """The bpf_prog_info of one loaded program.

    ``name`` is cut at 15 characters (BPF_OBJ_NAME_LEN). ``load_time`` is CLOCK_MONOTONIC ns,
    never later than the true start of its BPF_PROG_LOAD. ``functions`` are (start, length) of
    the main program and its subprograms in the kernel's order, and ``tags`` theirs; empty if
    it is not JITed, or if the kernel does not show where they are (``hidden``).
    ``jited_length`` is that of the main function in bytes, 0 if it is not JITed.
    ``split_tag`` is the tag of the main function on its own, where there are others; its
    symbol has ``tag``, which is that of the whole program. ``has_btf`` says that functions
    may have other names than ``name``. ``runs`` and ``run_ns`` are counted after ``measure``,
    and ``misses`` counts how often it was not run since it was running. ``func_infos`` and
    ``lines`` are numbers of records, ``target`` is the key of the trampoline of the function
    that it traces, 0 for none.
    """

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
        self.btf_id = self.func_infos = self.lines = self.target = 0


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
    return syscalls.bpf(syscalls.ENABLE_STATS, array("I", (0,)))  # BPF_STATS_RUN_TIME


def plain_names(program: ProgramInfo) -> list[str]:
    """The kernel's names of the functions of a program without BTF (bpf_get_prog_name())."""
    suffixes = [f"_{program.name}" if program.name else "", *["_F"] * len(program.tags)]
    return [f"bpf_prog_{tag}{suffix}" for tag, suffix in zip(program.tags, suffixes)]


class ProgramReader:
    """Reads programs into buffers that stay, and grow. SourceError where bpf(2) is refused."""

    def __init__(self) -> None:
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
            attr[0] = attr[1]
            yield attr[1]

    def newer_than(self, after: int) -> Iterator[ProgramInfo]:
        """The programs with ids above ``after``: what was loaded since, until ids wrap."""
        # To the end first: what loads meanwhile must not keep the walk going for ever.
        return self.by_id(list(self.ids(after)))

    def by_id(self, program_ids: Iterable[int]) -> Iterator[ProgramInfo]:
        """Those of the programs that are still there."""
        return filter(None, map(self.program, program_ids))

    def program(self, program_id: int) -> ProgramInfo | None:
        """One program; None if it is gone."""
        return _with_program(program_id, self.info)

    def function_names(self, program_id: int) -> list[str]:
        """The kernel's names of a program's functions, as kallsyms has them.

        From bpf(2) and the program's BTF, so also where kallsyms does not list programs
        (net.core.bpf_jit_kallsyms = 0). A name that is not known is ``""``; the list is
        empty if the program is gone.
        """
        return _with_program(program_id, lambda fd: self._names(self.info(fd))) or []

    def details(self, program_id: int, fd: int = -1) -> ProgramDetails:
        """A program with its names and lines; ``fd`` holds it already, or it is looked for."""
        if fd >= 0:
            return self._details(fd)
        return _with_program(program_id, self._details) or ProgramDetails(program_id, GONE)

    def info(self, fd: int, with_lines: bool = False) -> ProgramInfo:
        """The program that ``fd`` holds; ``with_lines`` has its line records in the buffers."""
        (
            type_, program_id, tag, jited, load_time, uid, name, starts, lengths, starts_at, _,
            btf_id, _, _, func_infos, lines, _, lines_at, jited_lines, _, _, _, _,
            run_ns, runs, misses, holder, target,
        ) = self._ask(fd, with_lines)  # fmt: skip
        functions = min(starts, lengths)
        most = max(functions, func_infos)
        most_lines = max(lines, jited_lines) if with_lines else 0
        if most > len(self._starts) or most_lines > len(self._addresses):
            rows = max(most_lines, len(self._addresses), _LINE_ROOM)
            self._make_room(max(most, len(self._starts)), rows)
            return self.info(fd, with_lines)
        # Blanked: the kernel clears the pointer (kptr_restrict) or the numbers (no CAP_BPF),
        # and leaves what was in the buffer before.
        hidden = bool(functions and not starts_at and jited)
        name = name.partition(b"\0")[0].decode("utf-8", "backslashreplace")
        # From CLOCK_BOOTTIME. Read in this order it is never later than the true time;
        # suspending puts the two clocks further apart.
        monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        load_time -= time.clock_gettime_ns(time.CLOCK_BOOTTIME) - monotonic
        info = ProgramInfo(program_id, type_, tag.hex(), name, load_time, uid, hidden)
        info.jited_length = jited
        info.run_ns, info.runs, info.misses = run_ns, runs, misses
        info.btf_id, info.func_infos, info.has_btf = btf_id, func_infos, bool(func_infos)
        info.lines = min(lines, jited_lines) if lines_at else 0
        info.target = holder << 32 | btf.IN_BTF | target if target else 0
        if starts_at:
            self._add_functions(info, functions)
        return info

    def _add_functions(self, info: ProgramInfo, count: int) -> None:
        tags = self._tags.tobytes()
        for at, (start, length) in enumerate(zip(self._starts[:count], self._lengths)):
            # A program that is not JITed has the interpreter's address and no length.
            if start and length:
                info.functions.append((start, length))
                info.tags.append(tags[_TAG_SIZE * at : _TAG_SIZE * (at + 1)].hex())
        if info.tags:
            info.split_tag, info.tags[0] = info.tags[0], info.tag

    def _details(self, fd: int) -> ProgramDetails:
        # Its BTF may go with the program, which is held until all is read.
        info = self.info(fd, with_lines=True)
        details = ProgramDetails(info.id, "")
        details.type, details.tag, details.uid = info.type, info.tag, info.uid
        details.load_time = info.load_time
        details.target = self._targets.name(info.target)
        details.trampoline = info.target if details.target else 0
        if not info.jited_length or info.hidden:
            details.problem = HIDDEN if info.hidden else NOT_JITED
            return details
        details.functions = [
            (start, length, name)
            for (start, length), name in zip(info.functions, self._names(info))
        ]
        blob = self._btf_of(info.btf_id)
        if blob and info.lines:
            details.lines, details.digest = self._table(info, blob)
        else:
            details.problem = WITHOUT
        return details

    def _table(self, info: ProgramInfo, blob: bytes) -> tuple[bytes, bytes]:
        """The packed lines, and their digest."""
        records = self._lines[: _LINE_INFO.size * info.lines].tobytes()
        offsets = rows_of(info.functions, self._addresses[: info.lines].tolist())
        lengths = array("I", [length for _, length in info.functions])
        key = (records, array("I", [at for _, at in offsets]).tobytes(), lengths.tobytes(), blob)
        if key not in self._packed:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            table = pack_lines(rows_with_lines(records, offsets, len(lengths), blob))
            self._packed[key] = (table, digest_of(table))
        return self._packed[key]

    def _names(self, info: ProgramInfo) -> list[str]:
        """As the kernel makes them: see bpf_get_prog_name() in kernel/bpf/core.c."""
        if not info.func_infos:
            return plain_names(info)
        type_ids = self._func_infos[1 : 2 * info.func_infos : 2].tolist()
        names = btf.function_names(self._btf_of(info.btf_id), type_ids)
        full = [names.get(type_id, "") for type_id in type_ids]
        full += ["F"] * (len(info.tags) - len(full))
        return [f"bpf_prog_{tag}_{name}" if name else "" for tag, name in zip(info.tags, full)]

    def _btf_of(self, btf_id: int) -> bytes:
        """A BTF object's bytes, none where it may not be read. Programs of a file share one."""
        if btf_id != self._btf[0]:
            blob = btf.read(btf_id)
            if not blob:  # It may work the next time.
                return b""
            self._btf = (btf_id, blob)
        return self._btf[1]

    def _make_room(self, functions: int, lines: int) -> None:
        self._starts = array("Q", bytes(8 * functions))
        self._lengths = array("I", bytes(4 * functions))
        self._func_infos = array("I", bytes(_FUNC_INFO_SIZE * functions))
        self._tags = array("B", bytes(_TAG_SIZE * functions))
        self._lines = array("B", bytes(_LINE_INFO.size * lines))
        self._addresses = array("Q", bytes(8 * lines))

    def _ask(self, fd: int, with_lines: bool) -> tuple[Any, ...]:
        """The fields of ``_INFO``; what they point to is in the buffers."""
        functions = len(self._starts)
        lines = len(self._addresses) if with_lines else 0
        starts, lengths, func_infos, rows, addresses, tags = (
            buffer.buffer_info()[0]
            for buffer in (
                self._starts, self._lengths, self._func_infos,
                self._lines, self._addresses, self._tags,
            )
        )  # fmt: skip
        fields = _INFO.pack(
            0, 0, b"", 0, 0, 0, b"", functions, functions, starts, lengths,
            0, _FUNC_INFO_SIZE, func_infos, functions,
            lines, rows, addresses, lines, _LINE_INFO.size, 8, functions, tags,
            0, 0, 0, 0, 0,
        )  # fmt: skip
        info = array("B", fields)
        try:
            syscalls.object_info(fd, info)
        except OSError as error:
            raise privileges.bpf_refusal(error) from error
        return _INFO.unpack(info)


def rows_of(functions: list[tuple[int, int]], addresses: list[int]) -> list[tuple[int, int]]:
    """For each row's address the number of the function that holds it, and the offset there.

    ``functions`` are (start, length). (-1, 0) for an address outside of all of them.
    """
    found = []
    in_order = sorted((start, number) for number, (start, _) in enumerate(functions))
    for address in addresses:
        start, number = in_order[bisect_right(in_order, (address, len(functions))) - 1]
        offset = address - start
        found.append((number, offset) if 0 <= offset < functions[number][1] else (-1, 0))
    return found


def rows_with_lines(
    records: bytes, offsets: list[tuple[int, int]], functions: int, blob: bytes
) -> list[list[LineRow]]:
    """Each function's rows, by offset, from bpf_line_info records and the program's BTF."""
    _, strings = btf.sections(blob)
    used = {at for _, *both, _ in _LINE_INFO.iter_unpack(records) for at in both}
    texts = {at: btf.string(strings, at) for at in used}
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
        if prog_id is None:
            return [], unpack_lines(b""), None
        if prog_id not in self._known:
            try:
                details = self._reader.details(prog_id)
            except SourceError:
                return [], unpack_lines(b""), None
            starts = [start for start, _, _ in details.functions]
            name = details.functions[0][2] if starts else None
            self._known[prog_id] = (starts, unpack_lines(details.lines), name or None)
        return self._known[prog_id]
