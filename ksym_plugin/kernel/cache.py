"""What was read from a large file, stored for the next time under $XDG_CACHE_HOME.

An entry belongs to one file in one state: device, inode, size and times. A build id would
not do: a stripped file shares it with the whole one. Nothing here raises for want of a
disk, or for what an entry contains: one that is damaged, of another version or another
user's counts as none.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
import zlib
from array import array
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Changes with what entries hold; big-endian machines write another.
_MAGIC = b"ksymcache3" + sys.byteorder[:1].encode()
#: Only files with it are removed.
_SUFFIX = ".kept"
_WORD = 8
#: Of a file written this lately another version may have the same times (the kernel's clock
#: for them steps by some ms): nothing is stored of it yet.
SETTLED_NS = 1_000_000_000
#: What all entries may take.
MOST_BYTES = 256 << 20
MOST_ENTRIES = 32


def root() -> str:
    """The folder of all that can be had again."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # One that is not absolute is to be ignored (XDG Base Directory Specification).
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "ksym-plugin")


def folder() -> str:
    """The folder of the entries."""
    return os.path.join(root(), "elf")


def identity(path: str) -> tuple[int, ...]:
    """What changes when the file does; OSError where there is none."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def load(of: tuple[int, ...], count: int) -> list[bytes] | None:
    """The ``count`` parts that were stored for the file, None if there is no good entry."""
    try:
        # Not waiting for a FIFO's writer.
        fd = os.open(_path(of), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(file.fileno())
            # Another user's may be there where HOME is that user's, as with sudo.
            is_own = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
            if not is_own or found.st_size > MOST_BYTES:
                return None
            data = file.read(found.st_size)
    except OSError:
        return None
    head, first = _head(of), _WORD * count
    body = memoryview(data)[len(head) + _WORD :]
    if len(body) < first or data[: len(head) + _WORD] != head + _checksum(body):
        return None
    ends = list(accumulate(array("Q", bytes(body[:first])), initial=first))
    if ends[-1] != len(body):
        return None
    return [bytes(body[start:end]) for start, end in zip(ends, ends[1:])]


def store(of: tuple[int, ...], parts: Sequence[bytes]) -> None:
    """Keep the parts for the next time, whole or not at all."""
    import tempfile

    # Their lengths go first.
    body = b"".join((array("Q", map(len, parts)), *parts))
    if time.time_ns() - max(of[-2:]) < SETTLED_NS or len(body) > MOST_BYTES // 2:
        return
    where = folder()
    with contextlib.suppress(OSError):
        os.makedirs(where, mode=0o700, exist_ok=True)
        status = os.lstat(where)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return
        fd, partial = tempfile.mkstemp(_SUFFIX, dir=where)
        try:
            with os.fdopen(fd, "wb") as file:
                file.writelines((_head(of), _checksum(body), body))
            os.rename(partial, _path(of))
        except BaseException:
            os.unlink(partial)
            raise
        _bound(where)


def _path(of: tuple[int, ...]) -> str:
    """One for each device and inode: an entry of an older file is written over."""
    return os.path.join(folder(), f"{of[0]:x}-{of[1]:x}{_SUFFIX}")


def _head(of: tuple[int, ...]) -> bytes:
    return _MAGIC + b"".join((value % (1 << 64)).to_bytes(_WORD, "big") for value in of)


def _checksum(body: bytes | memoryview) -> bytes:
    return zlib.crc32(body).to_bytes(_WORD, "big")


def _bound(where: str) -> None:
    """Remove what was written longest ago, also what a killed writer left."""
    with os.scandir(where) as listed:
        entries = [entry for entry in listed if entry.name.endswith(_SUFFIX)]
    found = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    found.sort(key=lambda one: one[0].st_mtime_ns, reverse=True)
    total = 0
    for number, (status, path) in enumerate(found):
        total += status.st_size
        if number >= MOST_ENTRIES or total > MOST_BYTES:
            os.unlink(path)
