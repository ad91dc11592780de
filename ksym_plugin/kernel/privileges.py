"""What this process may do to the kernel, and what to say where it may not."""

from __future__ import annotations

import errno

from ksym_plugin.kernel.identity import read_text
from ksym_plugin.timeline.errors import SourceError

_SYS_ADMIN = 1 << 21
_PERFMON_AND_BPF = 1 << 38 | 1 << 39

#: How kernel addresses become visible: see kallsyms_show_value() in kernel/kallsyms.c.
SHOW_ADDRESSES = "run as root or with CAP_SYSLOG, where kernel.kptr_restrict is below 2"
#: How kallsyms comes to list programs: see bpf_jit_kallsyms_enabled() in linux/filter.h.
LIST_PROGRAMS = "list them with: sysctl net.core.bpf_jit_kallsyms=1 net.core.bpf_jit_harden=0"
READ_PERF_CLOCK = (
    "set kernel.perf_event_paranoid to 2 or below, or sample with: perf record -k CLOCK_MONOTONIC"
)
LOAD_PROBES = "run as root or with CAP_BPF and CAP_PERFMON"


def require_probes(proc: str = "/proc", security: str = "/sys/kernel/security") -> None:
    """SourceError where BPF programs that read the kernel are not for this process."""
    found = read_text(f"{proc}/self/status").partition("CapEff:")[2].split()
    effective = int(found[0], 16) if found else -1  # All of them where that cannot be read.
    if not effective & _SYS_ADMIN and effective & _PERFMON_AND_BPF != _PERFMON_AND_BPF:
        raise SourceError("this user may not load BPF programs that trace the kernel", LOAD_PROBES)
    if "[confidentiality]" in read_text(f"{security}/lockdown"):
        raise SourceError(
            "the kernel is locked down for confidentiality, so BPF programs may not read it",
            "boot with lockdown=integrity, or without lockdown",
        )


def programs_hidden() -> SourceError:
    """The kernel lists programs, and not their addresses."""
    return SourceError("bpf(2) does not show where programs are", SHOW_ADDRESSES)


def modules_hidden() -> SourceError:
    """The kernel lists modules, and not their addresses."""
    return SourceError("the kernel hides where its modules are", SHOW_ADDRESSES)


def bpf_refusal(error: OSError) -> SourceError:
    """What a failed bpf(2) means for whoever asks about programs."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return SourceError(
            "bpf(2) does not let this user list BPF programs",
            "run as root or with CAP_SYS_ADMIN (CAP_BPF alone does not suffice)",
        )
    if error.errno == errno.ENOSYS:
        return SourceError(
            "this kernel has no bpf(2)", "use a kernel with CONFIG_BPF_SYSCALL, outside of gVisor"
        )
    return SourceError(f"bpf(2) fails: {error.strerror}")


def kprobe_refusal(error: OSError, function: str) -> SourceError:
    """What a failed perf_event_open(2) of a kprobe on ``function`` means."""
    if error.errno == errno.ENOENT:
        return SourceError(f"this kernel has no {function}", "use Linux 5.7 or later")
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceError(
            "the kernel does not let this user make kprobes",
            "run as root or with CAP_SYS_ADMIN, which Debian's and Ubuntu's kernels want here, "
            "and without kernel lockdown",
        )
    return SourceError(
        f"{function} takes no kprobe ({error.strerror})", "see /sys/kernel/debug/kprobes/blacklist"
    )


def perf_event_refusal(error: OSError, cpu: int) -> SourceError:
    """What a failed perf_event_open(2) for all tasks on a CPU, or mapping of its ring, means."""
    if error.errno == errno.EACCES:
        return SourceError(
            "perf_event_open(2) does not let this user watch all tasks",
            "run as root or with CAP_PERFMON, or set kernel.perf_event_paranoid to 0 or below "
            "(sysctl kernel.perf_event_paranoid=0)",
        )
    if error.errno == errno.EPERM:
        return SourceError(
            "a perf ring may not be made, for want of privilege or of lockable memory",
            "run as root or with CAP_PERFMON and CAP_IPC_LOCK, or raise kernel.perf_event_mlock_kb",
        )
    if error.errno in (errno.EINVAL, errno.E2BIG):
        return SourceError(
            "this kernel's perf_event_open(2) does not know ksymbol records",
            "use Linux 5.1 or later",
        )
    if error.errno == errno.EMFILE:
        return SourceError(
            "too many open files: two are needed for each CPU", "raise the limit (ulimit -n)"
        )
    if error.errno == errno.ENOSYS:
        return SourceError("this kernel has no perf events", "use one with CONFIG_PERF_EVENTS")
    return SourceError(f"perf_event_open(2) fails on CPU {cpu}: {error.strerror}")
