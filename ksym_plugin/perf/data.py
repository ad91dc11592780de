"""What a perf.data says of the kernel it was recorded on.

The handler gets samples from perf, but not the header; and the header tells which boot
the samples are from. Layout: tools/perf/Documentation/perf.data-file-format.txt.
"""

from __future__ import annotations

import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

#: What a perf.data begins with.
MAGIC = b"PERFILE2"
_HEADER = struct.Struct("=8sQQ6Q4Q")
_SECTION = struct.Struct("=QQ")
_RECORD = struct.Struct("=IHH")
_PAIR = struct.Struct("=II")
_BUILD_ID = 2
_HOSTNAME = 3
_OSRELEASE = 4
_EVENT_DESC = 12
_MISC_CPUMODE = 7
_MISC_KERNEL = 1
_MISC_MMAP_BUILD_ID = 1 << 14
_KERNEL_MAP = b"[kernel.kallsyms]"
_KERNEL_STARTS = (_KERNEL_MAP + b"_text", _KERNEL_MAP + b"_stext")
_PGOFF_AT = 32
#: PERF_RECORD_MMAP and _MMAP2, and where the name lies in each.
_MMAP_NAMES_AT = {1: 40, 10: 72}
#: The build id in an MMAP2 that has one (perf record --buildid-mmap), after its length.
_MMAP_BUILD_ID_SIZE_AT = 40
_MMAP_BUILD_ID_AT = 44
_BUILD_ID_AT = 12
_BUILD_ID_NAME_AT = 36
#: What is read of a section at most; a kernel map is among the first records.
_MOST = 1 << 20


class Recorded:
    """The kernel behind a perf.data; what the file does not say is None."""

    __slots__ = ("attrs", "build_id", "host", "release", "text_start", "width")

    def __init__(self) -> None:
        self.build_id: str | None = None
        self.host: str | None = None
        self.release: str | None = None
        #: The address of _text (or _stext) then: with KASLR, another at each boot.
        self.text_start: int | None = None
        #: How long the longest name of an event is, which perf aligns the names to.
        self.width = 0
        #: The raw perf_event_attr of each event, by name.
        self.attrs: dict[str, bytes] = {}


def read(path: str | None) -> Recorded:
    """What the header of ``path`` tells; nothing at all for a pipe or another format."""
    recorded = Recorded()
    if path is None or path == "-":
        return recorded
    if os.path.isdir(path):  # perf record --threads
        path = os.path.join(path, "data")
    try:
        with open(path, "rb") as file:
            _read_header(file, recorded)
    except (OSError, struct.error, ValueError, OverflowError):
        pass  # A file that perf can read and this cannot is no reason to stop perf.
    return recorded


def _read_header(file: BinaryIO, recorded: Recorded) -> None:
    magic, _, _, _, _, data_at, data_size, _, _, *flags = _HEADER.unpack(file.read(_HEADER.size))
    if magic != MAGIC:
        return
    file.seek(data_at)
    _read_kernel_map(file.read(min(data_size, _MOST)), recorded)
    file.seek(data_at + data_size)
    features = [bit for bit in range(256) if flags[bit // 64] >> bit % 64 & 1]
    table = file.read(_SECTION.size * len(features))
    for at, feature in enumerate(features):
        if feature not in (_BUILD_ID, _HOSTNAME, _OSRELEASE, _EVENT_DESC):
            continue
        offset, size = _SECTION.unpack_from(table, at * _SECTION.size)
        file.seek(offset)
        content = file.read(min(size, _MOST))
        if feature == _BUILD_ID:
            recorded.build_id = _kernel_build_id(content) or recorded.build_id
        elif feature == _HOSTNAME:
            recorded.host = _string(content)
        elif feature == _OSRELEASE:
            recorded.release = _string(content)
        else:
            _read_events(content, recorded)


def _string(content: bytes) -> str | None:
    """A length, then that many bytes, padded with NULs."""
    return content[4:].partition(b"\0")[0].decode("utf-8", "replace") or None


def _read_events(content: bytes, recorded: Recorded) -> None:
    """Of events: their number and their attr's size, then each attr, number of ids, name, ids."""
    count, attr_size = _PAIR.unpack_from(content)
    at = _PAIR.size
    attrs: dict[str, bytes] = {}
    longest = 0
    for _ in range(count):
        ids, size = _PAIR.unpack_from(content, at + attr_size)
        attr = content[at : at + attr_size]
        at += attr_size + _PAIR.size
        name = content[at : at + size].partition(b"\0")[0]
        longest = max(longest, len(name))
        attrs[name.decode("utf-8", "replace")] = attr
        at += size + 8 * ids
    recorded.width, recorded.attrs = longest, attrs


def _read_kernel_map(records: bytes, recorded: Recorded) -> None:
    """Where the kernel's text began: the page offset of the record of its own map."""
    for at, kind, misc, size in _records(records):
        name_at = _MMAP_NAMES_AT.get(kind)
        if name_at is None:
            continue
        name = records[at + name_at : at + size].partition(b"\0")[0]
        if name not in _KERNEL_STARTS:
            continue
        (start,) = struct.unpack_from("=Q", records, at + _PGOFF_AT)
        recorded.text_start = int(start)
        if misc & _MISC_MMAP_BUILD_ID and name_at != _MMAP_NAMES_AT[1]:
            length = records[at + _MMAP_BUILD_ID_SIZE_AT]
            build_id_at = at + _MMAP_BUILD_ID_AT
            recorded.build_id = records[build_id_at : build_id_at + min(length, 20)].hex() or None
        return


def _kernel_build_id(content: bytes) -> str | None:
    for at, _, misc, size in _records(content):
        name = content[at + _BUILD_ID_NAME_AT : at + size].partition(b"\0")[0]
        if misc & _MISC_CPUMODE == _MISC_KERNEL and name == _KERNEL_MAP:
            # 20 bytes and padding; newer perf keeps a shorter id's length in byte 20.
            length = content[at + _BUILD_ID_AT + 20]
            length = length if 0 < length <= 20 else 20
            return content[at + _BUILD_ID_AT : at + _BUILD_ID_AT + length].hex()
    return None


def _records(content: bytes) -> list[tuple[int, int, int, int]]:
    """Where each whole record lies: offset, type, misc, size."""
    records: list[tuple[int, int, int, int]] = []
    at = 0
    while at + _RECORD.size <= len(content):
        kind, misc, size = _RECORD.unpack_from(content, at)
        if size < _RECORD.size or at + size > len(content):
            break
        records.append((at, kind, misc, size))
        at += size
    return records


def path_of_running_perf() -> str | None:
    """The perf.data that the perf this runs inside of is reading (perf-script(1), -i)."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:
        return None
    return _input_of(words) or ("-" if _is_piped() else "perf.data")


def _input_of(words: list[str]) -> str | None:
    for at, word in enumerate(words):
        if word == "--":
            break
        if word in ("-i", "--input") and at + 1 < len(words):
            return words[at + 1]
        if word.startswith("--input="):
            return word[len("--input=") :]
        if word.startswith("-i") and not word.startswith("--") and len(word) > 2:
            return word[2:]
    return None


def _is_piped() -> bool:
    """Whether standard input is a pipe, which perf reads if it is not told what to read."""
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:
        return False
