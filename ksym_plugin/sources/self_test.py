"""Whether a probe sees what it should, tried with a program of its own.

Compilers inline: a function that may be probed need not be the one that runs. And
kernels differ in where a program's symbol ends.
"""

from __future__ import annotations

import os
import struct
from array import array

from ksym_plugin.kernel import bpf_prog, syscalls
from ksym_plugin.sources.ksym_records import ADD, DEL
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from ksym_plugin.sources.ksym_records import Record

_NAME: Final = "ksym_self_test"
_SOCKET_FILTER: Final = 1
#: r0 = 0; exit
_CODE: Final = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
#: prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version,
#: prog_flags, prog_name
_LOAD: Final = struct.Struct("=IIQQIIQII16s")


def run(take: Callable[[], list[Record]]) -> bool:
    """Whether the end of a program's symbol is that of its code, as far as can be told.

    ``take`` returns the records that the probe has left since it was last called.
    SourceError if the probe does not tell of both ends of a program.
    """
    try:
        fd = _load()
        try:
            length = bpf_prog.read(fd).jited_length
            added = _find(take(), ADD)
        finally:
            os.close(fd)
    except OSError as error:
        raise SourceError(f"the probe cannot be tried ({error.strerror})") from error
    deleted = _find(take(), DEL)
    if not length:
        # Not JITed, so without a symbol.
        return True
    if added is None or deleted is None:
        raise SourceError(
            "the probe does not see programs come and go (the compiler of this kernel may "
            "have inlined bpf_ksym_add or bpf_ksym_del)",
            "use --source perf_event",
        )
    return bool(added.length == length)


def _find(records: list[Record], kind: int) -> Record | None:
    for record in records:
        if record.kind == kind and record.name.endswith(f"_{_NAME}"):
            return record
    return None


def _load() -> int:
    code, license_ = array("B", _CODE), array("B", b"GPL\0")
    pointers = code.buffer_info()[0], license_.buffer_info()[0]
    attr = _LOAD.pack(_SOCKET_FILTER, 2, *pointers, 0, 0, 0, 0, 0, _NAME.encode())
    return syscalls.bpf(syscalls.PROG_LOAD, array("B", attr))
