"""What this process may do to the kernel's tracing."""

from __future__ import annotations

from ksym_plugin.timeline.errors import SourceError

_STATUS = "/proc/self/status"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_SYS_ADMIN = 1 << 21
_PERFMON = 1 << 38
_BPF = 1 << 39


def require_probes() -> None:
    """SourceError where BPF programs that read the kernel are not for this process."""
    held = _capabilities()
    if not held & _SYS_ADMIN and not (held & _PERFMON and held & _BPF):
        raise SourceError(
            "this user may not load BPF programs that trace the kernel",
            "run as root or with CAP_BPF and CAP_PERFMON",
        )
    if "[confidentiality]" in _read(_LOCKDOWN):
        raise SourceError(
            "the kernel is locked down for confidentiality, so BPF programs may not read it",
            "boot with lockdown=integrity, or without lockdown",
        )


def _capabilities() -> int:
    """The effective ones; all of them where /proc does not tell."""
    for line in _read(_STATUS).splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return -1


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
