"""The perf records that tell of BPF symbols, from their bytes.

Only the front of a record is read, counted forward from its header: the kernel pads the
records of one listener when another listener wants sample ids (perf_event_ksymbol()
grows a header that all share), so nothing can be told from a record's end.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Union

    Record = Union["KSymbol", "BpfEvent", "Lost"]

RECORD_LOST: Final = 2
RECORD_KSYMBOL: Final = 17
RECORD_BPF_EVENT: Final = 18

#: enum perf_record_ksymbol_type
KSYMBOL_BPF: Final = 1
KSYMBOL_OOL: Final = 2
#: PERF_RECORD_KSYMBOL_FLAGS_UNREGISTER
UNREGISTER: Final = 1
#: enum perf_bpf_event_type
PROG_LOAD: Final = 1
PROG_UNLOAD: Final = 2

_HEADER: Final = struct.Struct("=IHH")  # type, misc, size
_KSYMBOL: Final = struct.Struct("=QIHH")  # addr, len, ksym_type, flags
_BPF_EVENT: Final = struct.Struct("=HHI8s")  # type, flags, id, tag
_LOST: Final = struct.Struct("=QQ")  # id, lost
_NAME_AT: Final = _HEADER.size + _KSYMBOL.size


class KSymbol:
    """PERF_RECORD_KSYMBOL: a symbol comes, or goes (``unregister``)."""

    __slots__ = ("length", "name", "start", "type", "unregister")

    def __init__(self, start: int, length: int, type: int, unregister: bool, name: str) -> None:
        self.start = start
        self.length = length
        self.type = type
        self.unregister = unregister
        self.name = name


class BpfEvent:
    """PERF_RECORD_BPF_EVENT: a program was loaded or unloaded; follows its KSYMBOLs.

    ``id`` is 0 for an unload on kernels that gave the id back first (5.19 to 6.1).
    """

    __slots__ = ("id", "tag", "type")

    def __init__(self, type: int, id: int, tag: str) -> None:
        self.type = type
        self.id = id
        self.tag = tag


class Lost:
    """PERF_RECORD_LOST: ``count`` records found no room before this one."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def parse(data: bytes) -> tuple[list[Record], bool]:
    """The records in ``data``, and whether all of it could be read.

    Records of other types, and those too short for what they should hold, are skipped;
    a size that leads nowhere ends the reading.
    """
    records: list[Record] = []
    whole = True
    at = 0
    total = len(data)
    while at < total:
        if total - at < _HEADER.size:
            return records, False
        kind, _, size = _HEADER.unpack_from(data, at)
        end = at + size
        if size < _HEADER.size or end > total:
            return records, False
        record = _record(kind, data, at, end)
        if record is not None:
            records.append(record)
        elif kind in (RECORD_KSYMBOL, RECORD_BPF_EVENT, RECORD_LOST):
            whole = False
        at = end
    return records, whole


def _record(kind: int, data: bytes, at: int, end: int) -> Record | None:
    body = at + _HEADER.size
    if kind == RECORD_KSYMBOL and end >= at + _NAME_AT:
        start, length, type_, flags = _KSYMBOL.unpack_from(data, body)
        name_end = data.find(b"\0", at + _NAME_AT, end)
        if name_end < 0:
            return None
        name = data[at + _NAME_AT : name_end].decode("utf-8", "backslashreplace")
        return KSymbol(start, length, type_, bool(flags & UNREGISTER), name)
    if kind == RECORD_BPF_EVENT and end >= body + _BPF_EVENT.size:
        type_, _, program_id, tag = _BPF_EVENT.unpack_from(data, body)
        return BpfEvent(type_, program_id, tag.hex())
    if kind == RECORD_LOST and end >= body + _LOST.size:
        return Lost(_LOST.unpack_from(data, body)[1])
    return None
