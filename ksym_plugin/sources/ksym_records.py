"""What bpf/ksym_events.c tells: its records and its counters, from their bytes."""

from __future__ import annotations

import struct
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: The kinds of a change, which are also the keys of the map ``streams``.
ADD: Final = 0
DEL: Final = 1

#: struct record up to its name.
_HEAD: Final = struct.Struct("=QQIIIIIHBB16s")
#: The 64-bit words of struct stream.
_STREAM_WORDS: Final = 3
#: Numbers are 32 bits wide in records, and go round.
SEQ_MASK: Final = 0xFFFFFFFF


class Record:
    """One change of one symbol; see struct record for the fields."""

    __slots__ = (
        "comm",
        "cpu",
        "is_prog",
        "kind",
        "length",
        "name",
        "pid",
        "prog_id",
        "seq",
        "stamp",
        "start",
        "tid",
    )

    def __init__(self, data: bytes) -> None:
        """struct.error where ``data`` is too short."""
        (
            self.stamp,
            self.start,
            self.length,
            self.seq,
            self.prog_id,
            self.pid,
            self.tid,
            self.cpu,
            self.kind,
            self.is_prog,
            comm,
        ) = _HEAD.unpack_from(data)
        self.comm = _text(comm)
        self.name = _text(data[_HEAD.size :])


class Counts:
    """What the probe has counted on one CPU for one kind of change, since it was loaded."""

    __slots__ = ("lost", "lost_images", "seq")

    def __init__(self, seq: int, lost: int, lost_images: int) -> None:
        self.seq = seq
        self.lost = lost
        self.lost_images = lost_images


def parse_counts(data: array[int]) -> list[Counts]:
    """A value of the map ``streams``: one Counts for each CPU there can be."""
    return [Counts(*data[at : at + _STREAM_WORDS]) for at in range(0, len(data), _STREAM_WORDS)]


def counts_buffer(cpus: int) -> array[int]:
    """Room for a value of the map ``streams``."""
    return array("Q", bytes(8 * _STREAM_WORDS * cpus))


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")
