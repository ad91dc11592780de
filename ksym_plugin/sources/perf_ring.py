"""One perf event with its ring buffer, read in the forward direction."""

from __future__ import annotations

import errno
import mmap
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: Words of 8 bytes in struct perf_event_mmap_page.
_DATA_HEAD: Final = 128
_DATA_TAIL: Final = 129
#: Bytes of records a ring can hold; halved down to a page where less may be locked.
RING_BYTES: Final = 256 * 1024
#: With less room than this left a record may have been refused. The longest has a name
#: of 512 bytes and what other listeners made the kernel append.
_TIGHT: Final = 4096


class Ring:
    """The records of an event, mapped; owns the event's file descriptor ``fd``.

    ``lost_at_read`` says whether reading the event tells how many records were lost
    (PERF_FORMAT_LOST).
    """

    __slots__ = ("_data", "_lost", "_map", "_size", "_words", "cpu", "fd", "lost_at_read")

    def __init__(self, fd: int, cpu: int, lost_at_read: bool, size: int | None = None) -> None:
        """Takes ``fd`` over, also when the mapping fails with OSError."""
        self.fd = fd
        self.cpu = cpu
        self.lost_at_read = lost_at_read
        self._lost = 0
        try:
            self._map = _map(fd, size or RING_BYTES)
        except BaseException:
            os.close(fd)
            raise
        whole = memoryview(self._map)
        self._words = whole[: mmap.PAGESIZE].cast("Q")
        self._data = whole[mmap.PAGESIZE :]
        self._size = len(self._data)

    def close(self) -> None:
        """Unmap and close; idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._data.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def head(self) -> int:
        """Where the kernel will write next."""
        return self._words[_DATA_HEAD]

    def waiting(self, head: int) -> bool:
        """Whether there is anything to take up to ``head``."""
        return head != self._words[_DATA_TAIL]

    def take(self, head: int) -> tuple[bytes, bool]:
        """The bytes up to ``head``, whose room the kernel gets back.

        And whether the ring was so full that records may have been refused. A clock
        must have been read since ``head`` was: it is the read barrier between the two
        (the vDSO has one) that machines with weak ordering need.
        """
        tail = self._words[_DATA_TAIL]
        data = unrolled(self._data, tail, head)
        self._words[_DATA_TAIL] = head
        return data, head - tail > self._size - min(_TIGHT, self._size // 2)

    def newly_lost(self) -> int | None:
        """How many records were lost since the last call; None if the kernel cannot say."""
        if not self.lost_at_read:
            return None
        lost: int = struct.unpack("=QQ", os.read(self.fd, 16))[1]
        lost, self._lost = lost - self._lost, lost
        return lost


def unrolled(data: memoryview, tail: int, head: int) -> bytes:
    """What lies between two positions that count on while the ring goes round."""
    size = len(data)
    if not 0 <= head - tail <= size:
        # Only a broken ring: the kernel never overtakes the tail.
        return b""
    first = tail % size
    last = first + (head - tail)
    if last <= size:
        return bytes(data[first:last])
    return bytes(data[first:]) + bytes(data[: last - size])


def _map(fd: int, size: int) -> mmap.mmap:
    """Map a ring, smaller where perf_event_mlock_kb does not allow the full size."""
    size = max(size, mmap.PAGESIZE)
    while True:
        try:
            return mmap.mmap(fd, mmap.PAGESIZE + size)
        except OSError as error:
            if error.errno != errno.EPERM or size <= mmap.PAGESIZE:
                raise
            size //= 2
