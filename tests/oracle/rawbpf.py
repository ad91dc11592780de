"""bpf(2) through ctypes: load, run, ask, close. Little-endian 64-bit Linux only.

Every call may hang for good on a host whose kernel has lost its JIT pages; use
:mod:`tests.oracle.probe` first, and do the work in a child that can be abandoned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

SOCKET_FILTER = 1
SCHED_CLS = 3

ARRAY = 2
PROG_ARRAY = 3

_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE = 0, 1, 2, 3
_PROG_LOAD, _TEST_RUN, _GET_INFO, _BTF_LOAD = 5, 10, 15, 18
_PROG_BY_ID, _BTF_BY_ID = 13, 19
_NR_BPF = {"x86_64": 321, "aarch64": 280}
_ATTR_SIZE = 144
_INFO_SIZE = 208
_LOG_SIZE = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Info:
    """What bpf_prog_info says of one program; ``load_time`` is CLOCK_BOOTTIME ns."""

    __slots__ = ("id", "lens", "load_time", "name", "starts", "tag")

    def __init__(
        self, id: int, tag: str, name: str, load_time: int, starts: list[int], lens: list[int]
    ) -> None:
        self.id = id
        self.tag = tag
        self.name = name
        self.load_time = load_time
        self.starts = starts
        self.lens = lens


def _bpf(command: int, attr: bytearray) -> int:
    number = _NR_BPF.get(platform.machine())
    if number is None:
        raise OSError(f"no bpf(2) number known for {platform.machine()}")
    buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
    result: int = _libc.syscall(number, command, buffer, len(attr))
    del buffer
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"bpf command {command}: {os.strerror(error)}")
    return result


def _address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


def load(
    insns: bytes,
    name: str,
    prog_type: int = SOCKET_FILTER,
    btf_fd: int = 0,
    func_info: bytes = b"",
    line_info: bytes = b"",
) -> int:
    """A file descriptor (close-on-exec) of the program; OSError carries the verifier's log."""
    code = ctypes.create_string_buffer(insns, len(insns))
    license_ = ctypes.create_string_buffer(b"GPL")
    functions = ctypes.create_string_buffer(func_info, max(len(func_info), 1))
    lines = ctypes.create_string_buffer(line_info, max(len(line_info), 1))
    log = ctypes.create_string_buffer(_LOG_SIZE)
    attr = bytearray(_ATTR_SIZE)

    def attempt(level: int) -> int:
        count = len(insns) // 8
        struct.pack_into("=IIQQ", attr, 0, prog_type, count, _address(code), _address(license_))
        if level:
            struct.pack_into("=IIQ", attr, 24, level, _LOG_SIZE, _address(log))
        struct.pack_into("=16s", attr, 48, name.encode()[:15])
        if func_info:
            struct.pack_into("=IIQI", attr, 72, btf_fd, 8, _address(functions), len(func_info) // 8)
        if line_info:
            struct.pack_into("=IQI", attr, 92, 16, _address(lines), len(line_info) // 16)
        return _bpf(_PROG_LOAD, attr)

    try:
        return attempt(0)
    except OSError as error:
        first = error
    try:
        return attempt(1)
    except OSError:
        said = log.value.decode(errors="replace")
        raise OSError(first.errno, f"{first.strerror}\n{said}") from None


def load_btf(blob: bytes) -> int:
    data = ctypes.create_string_buffer(blob, len(blob))
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=QQI", attr, 0, _address(data), 0, len(blob))
    return _bpf(_BTF_LOAD, attr)


def test_run(fd: int, repeat: int, packet: bytes = bytes(64)) -> int:
    """Run a program ``repeat`` times; the kernel's own ns for one run."""
    data = ctypes.create_string_buffer(packet, len(packet))
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=IIIIQQI", attr, 0, fd, 0, len(packet), 0, _address(data), 0, repeat)
    _bpf(_TEST_RUN, attr)
    duration: int = struct.unpack_from("=I", attr, 36)[0]
    return duration


# pytest must not take the name for a test's.
test_run.__test__ = False  # type: ignore[attr-defined]


def info(fd: int, room: int = 64) -> Info:
    """id, tag, and the start and length of the program and each of its subprograms."""
    starts = (ctypes.c_uint64 * room)()
    lens = (ctypes.c_uint32 * room)()
    answer = ctypes.create_string_buffer(_INFO_SIZE)
    struct.pack_into("=II", answer, 104, room, room)
    struct.pack_into("=QQ", answer, 112, ctypes.addressof(starts), ctypes.addressof(lens))
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=IIQ", attr, 0, fd, _INFO_SIZE, _address(answer))
    _bpf(_GET_INFO, attr)
    prog_id, tag = struct.unpack_from("=I8s", answer, 4)
    nr_starts, nr_lens = struct.unpack_from("=II", answer, 104)
    return Info(
        prog_id,
        tag.hex(),
        struct.unpack_from("=16s", answer, 64)[0].rstrip(b"\0").decode(),
        struct.unpack_from("=Q", answer, 40)[0],
        list(starts[:nr_starts]),
        list(lens[:nr_lens]),
    )


class Row:
    """One row of a program's line table, from where the kernel keeps it."""

    __slots__ = ("address", "column", "file", "line", "text")

    def __init__(self, address: int, file: str, line: int, column: int, text: str) -> None:
        self.address = address
        self.file = file
        self.line = line
        self.column = column
        self.text = text


def open_id(prog_id: int) -> int:
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=I", attr, 0, prog_id)
    return _bpf(_PROG_BY_ID, attr)


def line_rows(fd: int, room: int = 4096) -> list[Row]:
    """The rows of all functions, in the kernel's order."""
    lines = (ctypes.c_uint32 * (4 * room))()
    addresses = (ctypes.c_uint64 * room)()
    answer = ctypes.create_string_buffer(_INFO_SIZE)
    struct.pack_into("=I", answer, 148, room)
    struct.pack_into("=QQI", answer, 152, *map(ctypes.addressof, (lines, addresses)), room)
    struct.pack_into("=II", answer, 172, 16, 8)
    _info_of(fd, answer)
    (count,) = struct.unpack_from("=I", answer, 168)
    strings = _btf_strings(struct.unpack_from("=I", answer, 128)[0])

    def string(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    rows = []
    for row in range(count):
        _, file, text, place = lines[4 * row : 4 * row + 4]
        line, column = divmod(place, 1024)
        rows.append(Row(addresses[row], string(file), line, column, string(text).strip()))
    return rows


def _btf_strings(btf_id: int) -> bytes:
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=I", attr, 0, btf_id)
    fd = _bpf(_BTF_BY_ID, attr)
    try:
        data = ctypes.create_string_buffer(1 << 20)
        answer = ctypes.create_string_buffer(32)
        struct.pack_into("=QI", answer, 0, ctypes.addressof(data), len(data))
        _info_of(fd, answer)
    finally:
        os.close(fd)
    header, _, _, at, length = struct.unpack_from("=IIIII", data, 4)
    return data.raw[header + at : header + at + length]


def _info_of(fd: int, answer: ctypes.Array[ctypes.c_char]) -> None:
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=IIQ", attr, 0, fd, len(answer), _address(answer))
    _bpf(_GET_INFO, attr)


def map_create(map_type: int, value_size: int = 4, entries: int = 1) -> int:
    attr = bytearray(_ATTR_SIZE)
    struct.pack_into("=IIII", attr, 0, map_type, 4, value_size, entries)
    return _bpf(_MAP_CREATE, attr)


def _element(command: int, fd: int, value: ctypes.Array[ctypes.c_char] | None) -> None:
    key = ctypes.create_string_buffer(4)
    attr = bytearray(_ATTR_SIZE)
    where = _address(value) if value is not None else 0
    struct.pack_into("=IIQQQ", attr, 0, fd, 0, _address(key), where, 0)
    _bpf(command, attr)


def map_get(fd: int) -> int:
    """The 32-bit value of element 0."""
    value = ctypes.create_string_buffer(4)
    _element(_MAP_LOOKUP, fd, value)
    return int.from_bytes(value.raw, "little")


def map_set(fd: int, number: int) -> None:
    """Set element 0 (of a program array: to the program with this descriptor)."""
    _element(_MAP_UPDATE, fd, ctypes.create_string_buffer(number.to_bytes(4, "little"), 4))


def map_delete(fd: int) -> None:
    _element(_MAP_DELETE, fd, None)


def kallsyms_bpf() -> dict[int, str]:
    """start -> name of the ``[bpf]`` lines, exactly as the kernel spells them."""
    with open("/proc/kallsyms", "rb") as file:
        text = file.read()
    lines = (line for line in text.splitlines() if line.endswith(b"\t[bpf]"))
    fields = (line.split(b"\t")[0].split(b" ", 2) for line in lines)
    return {int(start, 16): name.decode() for start, _, name in fields}


def close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
