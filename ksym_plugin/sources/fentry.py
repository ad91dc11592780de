"""The fentry source: BPF trampolines on the functions through which all BPF symbols go."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ksym_plugin.kernel import privileges
from ksym_plugin.sources.probe import KsymSource, load_program
from ksym_plugin.timeline.errors import SourceError

if TYPE_CHECKING:
    from contextlib import ExitStack

KERNEL_BTF = "/sys/kernel/btf/vmlinux"
_TRACING = 26  # BPF_PROG_TYPE_TRACING
_TRACE_FENTRY = 24  # BPF_TRACE_FENTRY


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
    try:
        fd = load_program(_TRACING, _TRACE_FENTRY)
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES)
    os.close(fd)
    return False
