"""The fentry source: BPF trampolines on the functions through which all BPF symbols go."""

from __future__ import annotations

import errno
import os
import struct
from array import array

from ksym_plugin.kernel import privileges, syscalls
from ksym_plugin.sources.probe import KsymSource
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import ExitStack

KERNEL_BTF = "/sys/kernel/btf/vmlinux"
_TRACING = 26
_TRACE_FENTRY = 24
#: r0 = 0; exit
_CODE = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
_ATTR_SIZE = 128


class FentrySource(KsymSource):
    """See ``KsymSource``. It needs BPF trampolines, BTF, bcc and the kernel's headers."""

    name = "fentry"
    flags = ("-DKSYM_FENTRY",)
    #: bcc attaches them for their names.
    programs = ("kfunc__bpf_ksym_add", "kfunc__bpf_ksym_del")

    def _check(self, stack: ExitStack) -> None:
        if not os.path.exists(KERNEL_BTF):
            raise SourceError(
                f"this kernel has no BTF ({KERNEL_BTF})",
                "use a kernel with CONFIG_DEBUG_INFO_BTF, and mount /sys",
            )
        privileges.require_probes()
        if _is_refused():
            raise SourceError(
                "this kernel does not let BPF programs trace its functions",
                "use a kernel with CONFIG_FUNCTION_TRACER and without restrictions on BPF",
            )


def _is_refused() -> bool:
    """Whether such programs are refused as such; tried with one that is attached to nothing."""
    code, license_ = array("B", _CODE), array("B", b"GPL\0")
    attr = array("B", bytes(_ATTR_SIZE))
    pointers = code.buffer_info()[0], license_.buffer_info()[0]
    struct.pack_into("=IIQQ", attr, 0, _TRACING, 2, *pointers)
    struct.pack_into("=I", attr, 68, _TRACE_FENTRY)
    try:
        fd = syscalls.bpf(syscalls.PROG_LOAD, attr)
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES)
    os.close(fd)
    return False
