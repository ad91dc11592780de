"""The header of a perf.data, and what it says of the kernel it was recorded on.

The handler gets samples from perf, but not the header; and the header tells which boot
the samples are from. Layout: tools/perf/Documentation/perf.data-file-format.txt. What
``perf record -o -`` writes has no header but two words: its records say the same.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import stat
import struct
import sys
from bisect import bisect_left

from ksym_plugin.timeline.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, Union

    #: What records are read of.
    Content = Union[bytes, mmap.mmap]

#: What a perf.data begins with, where it was written by a machine of this byte order.
MAGIC = b"PERFILE2"
#: The byte orders, for ``struct`` and by name.
_ORDERS = {b"PERFILE2": ("<", "little"), b"2ELIFREP": (">", "big")}
#: The size of the header that says that all else is in records.
_PIPE_HEADER = 16
_FILE_HEADER = "Q6Q4Q"
# Features. Some are a string, which tells something of the kernel.
_BUILD_ID, _EVENT_DESC, _SAMPLE_TIME = 2, 12, 21
_STRINGS = {3: "host", 4: "release", 6: "arch"}
_WANTED = (_BUILD_ID, *_STRINGS, _EVENT_DESC, _SAMPLE_TIME)
# Types of records: the kernel's, and from 64 on perf's own (tools/lib/perf/include/perf/event.h).
RECORD_MMAP, RECORD_SAMPLE, RECORD_MMAP2 = 1, 9, 10
RECORD_HEADER_ATTR, RECORD_TRACING_DATA, _HEADER_FEATURE = 64, 66, 80
# Of the ``misc`` of a record.
CPUMODE, KERNEL_MODE, _USER_MODE = 7, 1, 2
_MMAP_BUILD_ID = 1 << 14
_KERNEL_MAP = b"[kernel.kallsyms]"
_KERNEL_STARTS = (_KERNEL_MAP + b"_text", _KERNEL_MAP + b"_stext")
_PID_AT = 8
_PGOFF_AT = 32
#: What perf takes for memory without a file, whose addresses it prints as they are (map__new in
#: tools/perf/util/map.c).
_NO_FILES = (b"//anon", b"/dev/zero", b"/anon_hugepage", b"/SYSV")
#: Of a PERF_RECORD_HEADER_ATTR, where its perf_event_attr has the sample_type. A bit of that
#: says that samples have a time, and others what of 8 bytes each stands before it.
_SAMPLE_TYPE_AT = 32
_TIME = 1 << 2
_BEFORE_TIME = 1 << 16 | 1 | 1 << 1
#: Where the name lies in each.
_MMAP_NAMES_AT = {RECORD_MMAP: 40, RECORD_MMAP2: 72}
#: The build id in an MMAP2 that has one (perf record --buildid-mmap), after its length.
_MMAP_BUILD_ID_SIZE_AT = 40
_MMAP_BUILD_ID_AT = 44
_BUILD_ID_AT = 12
_BUILD_ID_NAME_AT = 36
#: What ``uname -m`` says where kernel addresses, and they alone, have the highest of 64 bits.
_KNOWN_MACHINES = frozenset(
    "x86_64 aarch64 aarch64_be arm64 ppc64 ppc64le riscv64 loongarch64 mips64".split()
)
_KERNEL_HALF = 1 << 63
#: What is read of a section at most; a kernel map is among the first records.
_MOST = 1 << 20
#: What untrue offsets and sizes lead to; OSError is what lseek(2) says of them.
DAMAGE = (struct.error, ValueError, OverflowError, OSError)


class DataError(KsymError):
    """A perf.data, or what is in it, is of a kind that is not read here.

    ``perf script`` may read it, or says what is wrong with it.
    """


def damaged() -> DataError:
    """What is raised where offsets, sizes or counts cannot be true."""
    return DataError("it is damaged")


class Recorded:
    """The kernel behind a perf.data; what the file does not say is None."""

    def __init__(self) -> None:
        self.build_id: str | None = None
        self.host: str | None = None
        self.release: str | None = None
        #: What ``uname -m`` said.
        self.arch: str | None = None
        #: The address of _text (or _stext) then: with KASLR, another at each boot.
        self.text_start: int | None = None
        #: Of the samples, ns on their own clock. Of a pipe's file the first is that of the first
        #: record of a sample, and the last is not known.
        self.first_time: int | None = None
        self.last_time: int | None = None
        #: How long the longest name of an event is, which perf aligns the names to.
        self.width = 0
        #: The names of the events in the order of the file, and by them the raw perf_event_attrs.
        self.names: list[str] = []
        self.attrs: dict[str, bytes] = {}
        #: The bits of the sections that there are.
        self.features: set[int] = set()

    @property
    def other_split(self) -> str:
        """Why kernel addresses cannot be told from a user's; nothing if they can.

        On most 64-bit machines they, and they alone, have the highest bit.
        """
        what = "" if self.arch is None or self.arch in _KNOWN_MACHINES else self.arch
        if self.arch is None and (self.text_start or _KERNEL_HALF) < _KERNEL_HALF:
            what = f"it begins at {self.text_start:#x}"
        return what and (
            f"it is of a kernel whose addresses are not told by the highest of 64 bits ({what})"
        )

    def learn(self, feature: int, content: bytes, order: str) -> None:
        """Take in a section of the header. struct.error if it is cut short."""
        self.features.add(feature)
        if feature == _BUILD_ID:
            self.build_id = _kernel_build_id(content, order) or self.build_id
        elif feature in _STRINGS:  # A length, then that many bytes, padded with NULs.
            text = content[4:].partition(b"\0")[0].decode("utf-8", "replace")
            setattr(self, _STRINGS[feature], text or None)
        elif feature == _SAMPLE_TIME:
            # 0 where perf looked at no sample (perf record -B).
            self.first_time, self.last_time = (
                time or None for time in struct.unpack_from(order + "QQ", content)
            )
        elif feature == _EVENT_DESC:
            named = _read_events(content, order)
            self.names = [name.decode("utf-8", "replace") for name, _ in named]
            self.attrs = dict(zip(self.names, (attr for _, attr in named)))
            self.width = max((len(name) for name, _ in named), default=0)


class Header:
    """The header of a file: ``attrs`` and ``data`` are offset and size of those parts.

    A pipe's has only its byte order, ``<`` or ``>``; all else follows as records.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Reads from where ``file`` stands. DataError for another format, struct.error if cut."""
        start = file.read(_PIPE_HEADER)
        if start[:8] not in _ORDERS:
            raise DataError("it is no perf.data, or one of before Linux 2.6.36")
        self.order, self.byteorder = _ORDERS[start[:8]]
        (size,) = struct.unpack_from(self.order + "Q", start, 8)
        self.is_pipe = size == _PIPE_HEADER
        self.attrs = self.data = (0, 0)
        #: Offset and size of each section, by the bit of its feature.
        self.features: dict[int, tuple[int, int]] = {}
        if self.is_pipe:
            return
        parts = struct.Struct(self.order + _FILE_HEADER)
        _, *at, data_at, data_size, _, _, a, b, c, d = parts.unpack(file.read(parts.size))
        self.attrs, self.data = (at[0], at[1]), (data_at, data_size)
        flags = a | b << 64 | c << 128 | d << 192
        features = [bit for bit in range(256) if flags >> bit & 1]
        file.seek(data_at + data_size)
        table = file.read(16 * len(features))
        places = struct.iter_unpack(self.order + "QQ", table[: len(table) // 16 * 16])
        self.features.update(zip(features, places))


def read(path: str | None) -> Recorded:
    """What the header of ``path`` tells; nothing at all for a pipe or another format.

    Of a file on standard input (``-``) it reads nothing away. A file that perf can read and
    this cannot is no reason to stop perf.
    """
    recorded = Recorded()
    if path is None:
        return recorded
    with contextlib.suppress(*DAMAGE, DataError):
        if path == "-":
            path = "/proc/self/fd/0" if stat.S_ISREG(os.fstat(0).st_mode) else os.devnull
        elif os.path.isdir(path):  # perf record --threads
            path = os.path.join(path, "data")
        with open(path, "rb") as file:
            _read_header(file, recorded)
    return recorded


def read_start(start: bytes) -> Recorded:
    """The same of the beginning of a perf.data, as far as it goes."""
    recorded = Recorded()
    with contextlib.suppress(*DAMAGE, DataError):
        _read_header(io.BytesIO(start), recorded)
    return recorded


def _read_header(file: BinaryIO, recorded: Recorded) -> None:
    header = Header(file)
    if header.is_pipe:
        records = file.read(_MOST)
        _read_pipe(records, recorded, header.order)
    else:
        file.seek(header.data[0])
        records = file.read(min(header.data[1], _MOST))
    recorded.features.update(header.features)
    _read_kernel_map(records, recorded, header.order)
    for feature in _WANTED:
        if feature in header.features:
            offset, size = header.features[feature]
            file.seek(offset)
            recorded.learn(feature, file.read(min(size, _MOST)), header.order)


def _read_pipe(records: bytes, recorded: Recorded, order: str) -> None:
    """Take in what stands before the first sample, and when that was taken.

    The time is not known where samples of several events have it in different places.
    """
    word = struct.Struct(order + "Q")
    types: set[int] = set()
    for at, kind, _, size in _records(records, order):
        if kind == _HEADER_FEATURE:
            (feature,) = word.unpack_from(records, at + 8)
            recorded.learn(feature, records[at + 16 : at + size], order)
        elif kind == RECORD_HEADER_ATTR:
            types.update(word.unpack_from(records, at + _SAMPLE_TYPE_AT))
        elif kind == RECORD_SAMPLE:
            places = {bin(a & _BEFORE_TIME).count("1") if a & _TIME else None for a in types}
            place = places.pop() if len(places) == 1 else None
            if place is not None:
                (recorded.first_time,) = word.unpack_from(records[at : at + size], 8 + 8 * place)
            return


def _read_events(content: bytes, order: str) -> list[tuple[bytes, bytes]]:
    """Name and attr of each event.

    Their number and their attr's size, then each attr, number of ids, name, ids.
    """
    pair = struct.Struct(order + "II")
    count, attr_size = pair.unpack_from(content)
    at = pair.size
    named: list[tuple[bytes, bytes]] = []
    for _ in range(count):
        ids, size = pair.unpack_from(content, at + attr_size)
        attr = content[at : at + attr_size]
        at += attr_size + pair.size
        named.append((content[at : at + size].partition(b"\0")[0], attr))
        at += size + 8 * ids
    return named


def _read_kernel_map(records: bytes, recorded: Recorded, order: str) -> None:
    """Take in the record of the kernel's own map: its text's start (pgoff), and its build id."""
    for at, kind, misc, size in _records(records, order):
        record = records[at : at + size]
        if not is_core_map(kind, record):
            continue
        (recorded.text_start,) = struct.unpack_from(order + "Q", record, _PGOFF_AT)
        if misc & _MMAP_BUILD_ID and kind == RECORD_MMAP2:
            length = min(record[_MMAP_BUILD_ID_SIZE_AT], 20)
            build_id = record[_MMAP_BUILD_ID_AT : _MMAP_BUILD_ID_AT + length]
            recorded.build_id = build_id.hex() or None
        return


def user_maps(path: str | None) -> dict[str, set[tuple[int, int, int]]]:
    """Where processes had files: the first address, that behind the last, and the offset in the
    file, by the file's name. Nothing of what is no file, is compressed or cannot be read."""
    by_process: dict[int, list[tuple[int, int, int, bytes]]] = {}
    with contextlib.suppress(*DAMAGE, DataError), open(path or "", "rb") as file:
        header = Header(file)
        start, length = (_PIPE_HEADER, sys.maxsize) if header.is_pipe else header.data
        place = struct.Struct(header.order + "ixxxxQQQ")
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            for at, kind, misc, size in _records(content, header.order, start, start + length):
                if kind in _MMAP_NAMES_AT and misc & CPUMODE == _USER_MODE:
                    pid, first, length, offset = place.unpack_from(content, at + _PID_AT)
                    name = content[at + _MMAP_NAMES_AT[kind] : at + size].partition(b"\0")[0]
                    _lay_over(by_process.setdefault(pid, []), first, first + length, offset, name)
    maps: dict[str, set[tuple[int, int, int]]] = {}
    for first, last, offset, name in {one for maps_of in by_process.values() for one in maps_of}:
        if name == b"[vdso]" or (name[:1] == b"/" and not name.startswith(_NO_FILES)):
            known = maps.setdefault(name.decode("utf-8", "surrogateescape"), set())
            known.add((first, last, offset))
    return maps


def _lay_over(
    maps: list[tuple[int, int, int, bytes]], first: int, last: int, offset: int, name: bytes
) -> None:
    """Take a map into those of a process, which are sorted; what lies beneath it has gone.

    A program is mapped as a whole first, and then its parts over that (fs/binfmt_elf.c).
    """
    low = bisect_left(maps, (first,))
    if low and maps[low - 1][1] > first:
        low -= 1
    high = bisect_left(maps, (last,), low)
    fresh = [(first, last, offset, name)]
    if low < high:
        start, end, at, file = maps[low]
        if start < first:
            fresh.insert(0, (start, first, at, file))
        start, end, at, file = maps[high - 1]
        if last < end:
            fresh.append((last, end, at + last - start, file))
    maps[low:high] = fresh


def is_core_map(kind: int, record: bytes) -> bool:
    """Whether a record is that of the core image's map."""
    name_at = _MMAP_NAMES_AT.get(kind)
    return name_at is not None and record[name_at:].partition(b"\0")[0] in _KERNEL_STARTS


def _kernel_build_id(content: bytes, order: str) -> str | None:
    for at, _, misc, size in _records(content, order):
        name = content[at + _BUILD_ID_NAME_AT : at + size].partition(b"\0")[0]
        if misc & CPUMODE == KERNEL_MODE and name == _KERNEL_MAP:
            # 20 bytes and padding; newer perf keeps a shorter id's length in byte 20.
            length = content[at + _BUILD_ID_AT + 20]
            length = length if 0 < length <= 20 else 20
            return content[at + _BUILD_ID_AT : at + _BUILD_ID_AT + length].hex()
    return None


def _records(
    content: Content, order: str, at: int = 0, end: int = sys.maxsize
) -> Iterator[tuple[int, int, int, int]]:
    """Where each whole record lies: offset, type, misc, size."""
    record = struct.Struct(order + "IHH")
    end = min(end, len(content))
    while at + record.size <= end:
        kind, misc, size = record.unpack_from(content, at)
        if size < record.size or at + size > end:
            return
        yield at, kind, misc, size
        at += size + size_behind(kind, content, at, order)


def size_behind(kind: int, content: Content, at: int, order: str) -> int:
    """How much follows a record that is not counted in its size: what it announces."""
    if kind == RECORD_TRACING_DATA:
        return (int(struct.unpack_from(order + "I", content, at + 8)[0]) + 7) & ~7
    return 0


def path_of_running_perf() -> str | None:
    """The perf.data that the perf this runs inside of is reading (perf-script(1), -i)."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
    except OSError:
        return None
    path = ""
    for word, following in zip(words, words[1:]):
        if word == "--" or path:
            break
        if word in ("-i", "--input"):
            path = following
        elif word.startswith("--input="):
            path = word[len("--input=") :]
        elif word.startswith("-i"):
            path = word[len("-i") :]
    return path or ("-" if is_piped() else "perf.data")


def is_piped() -> bool:
    """Whether standard input is a pipe, which perf reads if it is not told what to read."""
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:
        return False
