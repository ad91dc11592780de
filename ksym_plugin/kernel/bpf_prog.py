"""The BPF programs the kernel holds, through bpf(2).

Listing and opening programs needs CAP_SYS_ADMIN, their addresses CAP_SYSLOG as well
(unless kernel.kptr_restrict is 0) and kernel.kptr_restrict below 2. A program is held
open only while it is asked about; one that goes away meanwhile is left out.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from array import array

from ksym_plugin.kernel import btf, syscalls
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: struct bpf_prog_info up to recursion_misses; older kernels leave the end of it alone.
_SIZE = 216
_JITED_LENGTH = 16
_COST = struct.Struct("=QQQ")  # run_time_ns, run_cnt, recursion_misses, at 192
_RUN_TIME = 0


class Info:
    """``jited_length`` of the main function in bytes, 0 if it is not JITed.

    ``runs`` and ``run_ns`` are counted while somebody wants them: see ``measure``.
    ``misses`` counts when it was not run because it was running.
    """

    __slots__ = ("jited_length", "misses", "run_ns", "runs")

    def __init__(self, data: bytes) -> None:
        self.jited_length: int = struct.unpack_from("=I", data, _JITED_LENGTH)[0]
        self.run_ns, self.runs, self.misses = _COST.unpack_from(data, 192)


def read(fd: int) -> Info:
    """Ask about the program that ``fd`` holds."""
    info = array("B", bytes(_SIZE))
    attr = struct.pack("=IIQ", fd, len(info), info.buffer_info()[0])
    syscalls.bpf(syscalls.OBJ_GET_INFO_BY_FD, array("B", attr))
    return Info(info.tobytes())


def measure() -> int:
    """Have the kernel count run times of all programs while the descriptor is open."""
    return syscalls.bpf(syscalls.ENABLE_STATS, array("I", (_RUN_TIME,)))


#: struct bpf_prog_info up to and including prog_tags, all of it older than KSYMBOL.
_INFO_SIZE = 192
_HEAD = struct.Struct("=II8s")  # type, id, tag
_LOADED = struct.Struct("=QI")  # load_time, created_by_uid, at 40
_NAME = slice(64, 80)
_FUNCTIONS = struct.Struct("=IIQQ")  # at 104
_BTF = struct.Struct("=IIQI")  # btf_id, func_info_rec_size, func_info, its number, at 128
_TAGS = struct.Struct("=IQ")  # nr_prog_tags, prog_tags, at 180
_FUNC_INFO_SIZE = 8
#: Functions there is room for at the first try.
_ROOM = 32
_TAG_SIZE = 8

HIDDEN_PROBLEM = "bpf(2) does not show where programs are"
HIDDEN_REMEDY = (
    "run as root or with CAP_SYSLOG, and set kernel.kptr_restrict below 2 "
    "(sysctl kernel.kptr_restrict=1)"
)


class Program:
    """One loaded program.

    ``load_time`` is CLOCK_MONOTONIC ns, never later than the true start of its
    BPF_PROG_LOAD. ``functions`` are (start, length) of the main program and its
    subprograms in the kernel's order, and ``tags`` theirs; empty if the program is not
    JITed. ``name`` is cut at 15 characters (BPF_OBJ_NAME_LEN). ``hidden`` says that the
    program has functions and the kernel would not tell where. ``split_tag`` is the tag of
    the main function on its own, where there are others; its symbol has ``tag``, which
    is that of the whole program. ``has_btf`` says that its functions may have other names
    than ``name`` tells.
    """

    __slots__ = (
        "functions",
        "has_btf",
        "hidden",
        "id",
        "load_time",
        "name",
        "split_tag",
        "tag",
        "tags",
        "type",
        "uid",
    )

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
        self.functions: list[tuple[int, int]] = []
        self.tags: list[str] = []
        self.split_tag = tag
        self.has_btf = True

    def __repr__(self) -> str:
        return f"Program({self.id}, {self.tag}, {self.name}, {len(self.functions)} functions)"


def program_ids(after: int = 0) -> Iterator[int]:
    """The ids above ``after``, ascending, without opening anything."""
    attr = array("I", (after, 0, 0, 0))
    while True:
        try:
            syscalls.bpf(syscalls.PROG_GET_NEXT_ID, attr)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise refusal(error) from error
        found = attr[1]
        yield found
        attr[0] = found


def programs() -> Iterator[Program]:
    """All programs, by id. SourceError where bpf(2) is refused."""
    return newer_than(0)


def newer_than(after: int) -> Iterator[Program]:
    """The programs with ids above ``after``: what was loaded since, until ids wrap."""
    # To the end first: what loads meanwhile must not keep the walk going for ever.
    yield from by_id(list(program_ids(after)))


def by_id(program_ids: Iterable[int]) -> Iterator[Program]:
    """Those of the programs that are still there."""
    inquiry = _Inquiry()
    for program_id in program_ids:
        found = inquiry.program(program_id)
        if found is not None:
            yield found


def program(program_id: int) -> Program | None:
    """One program; None if it is gone. SourceError where bpf(2) is refused."""
    return _Inquiry().program(program_id)


def function_names(program_id: int) -> list[str]:
    """The names the kernel gave a program's functions, as kallsyms has them.

    From bpf(2) and the program's BTF, so also where kallsyms does not list programs
    (net.core.bpf_jit_kallsyms = 0). A name that cannot be told is ``""``; the list is
    empty if the program is gone.
    """
    return _Inquiry().function_names(program_id)


def plain_names(program: Program) -> list[str]:
    """The names the kernel gave the functions of a program without BTF."""
    # bpf_get_prog_name() in kernel/bpf/core.c; a subprogram's own name is "F".
    names = [program.name, *["F"] * len(program.tags)]
    return [_spell(tag, name, False) for tag, name in zip(program.tags, names)]


def refusal(error: OSError) -> SourceError:
    """What a failed bpf(2) means for whoever needs it."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return SourceError(
            "bpf(2) does not let this user list BPF programs",
            "run as root or with CAP_SYS_ADMIN (CAP_BPF alone does not suffice)",
        )
    if error.errno == errno.ENOSYS:
        return SourceError(
            "this kernel has no bpf(2)", "use a kernel with CONFIG_BPF_SYSCALL, outside of gVisor"
        )
    return SourceError(f"bpf(2) fails: {error.strerror}")


class _Inquiry:
    """Asks about programs one after the other; the buffers are made once."""

    def __init__(self) -> None:
        self._info = array("B", bytes(_INFO_SIZE))
        self._attr = array("I", bytes(16))
        self._boottime_ahead = boottime_ahead()
        self._make_room(_ROOM)

    def _make_room(self, room: int) -> None:
        self._room = room
        self._starts = array("Q", bytes(8 * room))
        self._lengths = array("I", bytes(4 * room))
        self._tags = array("B", bytes(_TAG_SIZE * room))

    def program(self, program_id: int) -> Program | None:
        """One program; None if it is gone."""
        fd = self._open(syscalls.PROG_GET_FD_BY_ID, program_id)
        if fd < 0:
            return None
        try:
            self._ask(fd)
        finally:
            os.close(fd)
        return self._read()

    def function_names(self, program_id: int) -> list[str]:
        """A program's function names; see the module's function."""
        fd = self._open(syscalls.PROG_GET_FD_BY_ID, program_id)
        if fd < 0:
            return []
        try:
            self._ask(fd)
            type_ids = self._ask_type_ids(fd)
        finally:
            os.close(fd)
        btf_id = _BTF.unpack_from(self._info, 128)[0]
        names = btf.function_names(self._btf(btf_id), type_ids) if type_ids else {}
        found = self._read()
        if not type_ids:
            return plain_names(found)
        full = [names.get(type_id, "") for type_id in type_ids]
        full += ["F"] * (len(found.tags) - len(full))
        return [_spell(tag, name, True) for tag, name in zip(found.tags, full)]

    def _open(self, command: int, object_id: int) -> int:
        """A file descriptor, -1 if there is no such object (any more)."""
        try:
            return syscalls.bpf(command, array("I", (object_id, 0, 0, 0)))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return -1
            raise refusal(error) from error

    def _ask(self, fd: int) -> None:
        """Fill the buffers; once more if the program has more functions than they hold."""
        while True:
            self._info[:] = array("B", bytes(_INFO_SIZE))
            room = self._room
            starts, lengths, tags = (
                buffer.buffer_info()[0] for buffer in (self._starts, self._lengths, self._tags)
            )
            _FUNCTIONS.pack_into(self._info, 104, room, room, starts, lengths)
            _TAGS.pack_into(self._info, 180, room, tags)
            self._get_info(fd, self._info)
            number = max(_FUNCTIONS.unpack_from(self._info, 104)[:2])
            if number <= room:
                return
            self._make_room(number)

    def _ask_type_ids(self, fd: int) -> list[int]:
        """The BTF type ids of the functions, in their order; needs what ``_ask`` left."""
        number = _BTF.unpack_from(self._info, 128)[3]
        if not number:
            return []
        records = array("I", bytes(_FUNC_INFO_SIZE * number))
        info = array("B", bytes(_INFO_SIZE))
        address = records.buffer_info()[0]
        _BTF.pack_into(info, 128, 0, _FUNC_INFO_SIZE, address, number)
        self._get_info(fd, info)
        return list(records[1::2])

    def _btf(self, btf_id: int) -> bytes:
        """A BTF object's bytes; none where it is gone or CAP_SYS_ADMIN is missing."""
        try:
            fd = self._open(syscalls.BTF_GET_FD_BY_ID, btf_id)
        except SourceError:
            return b""
        if fd < 0:
            return b""
        try:
            # struct bpf_btf_info: btf, btf_size, id, name, name_len, kernel_btf
            info = array("B", bytes(32))
            self._get_info(fd, info)
            (size,) = struct.unpack_from("=I", info, 8)
            blob = array("B", bytes(size))
            info[:] = array("B", struct.pack("=QI", blob.buffer_info()[0], size) + bytes(20))
            self._get_info(fd, info)
            return blob.tobytes()
        finally:
            os.close(fd)

    def _get_info(self, fd: int, info: array[int]) -> None:
        attr = struct.pack("=IIQ", fd, len(info), info.buffer_info()[0])
        self._attr[:] = array("I", attr)
        try:
            syscalls.bpf(syscalls.OBJ_GET_INFO_BY_FD, self._attr)
        except OSError as error:
            raise refusal(error) from error

    def _read(self) -> Program:
        info = self._info
        type_, program_id, tag = _HEAD.unpack_from(info, 0)
        load_time, uid = _LOADED.unpack_from(info, 40)
        name = info[_NAME].tobytes().split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
        starts, lengths, starts_at, _ = _FUNCTIONS.unpack_from(info, 104)
        jited = struct.unpack_from("=I", info, 16)[0]
        # Blanked: the kernel clears the pointer (kptr_restrict) or the numbers (no CAP_BPF).
        hidden = bool(starts and not starts_at and jited)
        found = Program(
            program_id, type_, tag.hex(), name, load_time - self._boottime_ahead, uid, hidden
        )
        tags = self._tags.tobytes()
        for at in range(min(starts, lengths) if starts_at else 0):
            start, length = self._starts[at], self._lengths[at]
            # A program that is not JITed has the interpreter's address and no length.
            if start and length:
                found.functions.append((start, length))
                found.tags.append(tags[_TAG_SIZE * at : _TAG_SIZE * (at + 1)].hex())
        found.has_btf = bool(_BTF.unpack_from(info, 128)[3])
        if found.tags:
            found.split_tag, found.tags[0] = found.tags[0], found.tag
        return found


def _spell(tag: str, name: str, has_btf: bool) -> str:
    """``bpf_prog_<tag>[_<name>]``; ``""`` where BTF has a name and it cannot be read."""
    if not name and has_btf:
        return ""
    return f"bpf_prog_{tag}_{name}" if name else f"bpf_prog_{tag}"


def boottime_ahead() -> int:
    """At least how far CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC, in ns.

    The greatest value that the readings allow, so that a time converted with it is never
    later than the true one. Suspending makes it grow, which errs on the same side.
    """
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - monotonic
