"""What a perf.data says of the kernel it was recorded on.

The handler gets samples from perf, but not the header; and the header tells which boot
the samples are from. Layout: tools/perf/Documentation/perf.data-file-format.txt.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, Final

_MAGIC: Final = b"PERFILE2"
_HEADER: Final = struct.Struct("=8sQQ6Q4Q")
_SECTION: Final = struct.Struct("=QQ")
_RECORD: Final = struct.Struct("=IHH")
_BUILD_ID: Final = 2
_HOSTNAME: Final = 3
_OSRELEASE: Final = 4
_MISC_CPUMODE: Final = 7
_MISC_KERNEL: Final = 1
_RECORD_MMAP: Final = 1
_KERNEL_MAP: Final = b"[kernel.kallsyms]"
_MMAP_PGOFF_AT: Final = 32
_MMAP_NAME_AT: Final = 40
_BUILD_ID_AT: Final = 12
_BUILD_ID_NAME_AT: Final = 36
#: What is read of a section at most; a kernel map is among the first records.
_MOST: Final = 1 << 20


class Recorded:
    """The kernel behind a perf.data; what the file does not say is None."""

    __slots__ = ("build_id", "host", "release", "text_start")

    def __init__(self) -> None:
        self.build_id: str | None = None
        self.host: str | None = None
        self.release: str | None = None
        #: The address of _text (or _stext) then: with KASLR, another at each boot.
        self.text_start: int | None = None


def read(path: str | None) -> Recorded:
    """What the header of ``path`` tells; nothing at all for a pipe or another format."""
    recorded = Recorded()
    if path is None or path == "-":
        return recorded
    try:
        with open(path, "rb") as file:
            _read_header(file, recorded)
    except (OSError, struct.error, ValueError, OverflowError):
        pass  # A file that perf can read and this cannot is no reason to stop perf.
    return recorded


def _read_header(file: BinaryIO, recorded: Recorded) -> None:
    magic, _, _, _, _, data_at, data_size, _, _, *flags = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        return
    file.seek(data_at)
    recorded.text_start = _kernel_text(file.read(min(data_size, _MOST)))
    file.seek(data_at + data_size)
    features = [bit for bit in range(256) if flags[bit // 64] >> bit % 64 & 1]
    table = file.read(_SECTION.size * len(features))
    for at, feature in enumerate(features):
        if feature not in (_BUILD_ID, _HOSTNAME, _OSRELEASE):
            continue
        offset, size = _SECTION.unpack_from(table, at * _SECTION.size)
        file.seek(offset)
        content = file.read(min(size, _MOST))
        if feature == _BUILD_ID:
            recorded.build_id = _kernel_build_id(content)
        elif feature == _HOSTNAME:
            recorded.host = _string(content)
        else:
            recorded.release = _string(content)


def _string(content: bytes) -> str | None:
    """A length, then that many bytes, padded with NULs."""
    return content[4:].partition(b"\0")[0].decode("utf-8", "replace") or None


def _kernel_text(records: bytes) -> int | None:
    """Where the kernel's text began: the page offset of its own PERF_RECORD_MMAP."""
    for at, kind, _, size in _records(records):
        name = records[at + _MMAP_NAME_AT : at + size].partition(b"\0")[0]
        if kind == _RECORD_MMAP and name in (_KERNEL_MAP + b"_text", _KERNEL_MAP + b"_stext"):
            (start,) = struct.unpack_from("=Q", records, at + _MMAP_PGOFF_AT)
            return int(start)
    return None


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
    for at, word in enumerate(words):
        if word == "--":
            break
        if word in ("-i", "--input") and at + 1 < len(words):
            return words[at + 1]
        if word.startswith("--input="):
            return word[len("--input=") :]
        if word.startswith("-i") and not word.startswith("--") and len(word) > 2:
            return word[2:]
    return "perf.data"
