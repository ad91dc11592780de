"""bpf/ksym_events.c, compiled and loaded by bcc.

bcc, the compiler in it and the verifier write to the process's standard output and error,
whatever its caller does with them. Here that goes to a file while they work, and what
matters of it into the error.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os

from ksym_plugin.errors import SourceError
from ksym_plugin.sources import bcc_module, btf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Final

_SOURCE: Final = "ksym_events.c"
_KERNEL_BTF: Final = "/sys/kernel/btf/vmlinux"
_SAID_ON: Final = (1, 2)
#: How much of what is said is looked at, and how much of it repeated.
_HEARD: Final = 65536
_QUOTED: Final = 200
_NO_HEADERS: Final = "kernel headers"


class BccProgram:
    """A module of bcc's: programs to load, and maps.

    Closing it unloads and detaches everything; SourceError if it cannot be compiled.
    """

    def __init__(self, flags: list[str]) -> None:
        text = source_text()
        bcc = bcc_module.load()
        self._kprobe: int = bcc.BPF.KPROBE
        # First there and then made: one whose making fails has kept itself alive, and
        # must be found to be closed.
        self._bpf: Any = bcc.BPF.__new__(bcc.BPF)
        error: Exception | None = None
        with _Aside() as aside:
            try:
                self._bpf.__init__(text=text, cflags=[*flags, *layout_flags()])
            except Exception as raised:  # noqa: BLE001 - bcc raises nothing narrower
                error = raised
        if error is not None:
            self.close()
            raise _refusal(error, aside.text) from error

    def kprobe(self, name: str) -> int:
        """The descriptor of a function loaded as a kprobe's program; it stays bcc's."""
        error: Exception | None = None
        with _Aside() as aside:
            try:
                fd: int = self._bpf.load_func(name.encode(), self._kprobe).fd
            except Exception as raised:  # noqa: BLE001
                error = raised
        if error is not None:
            raise _refusal(error, aside.text) from error
        return fd

    def attached(self, name: str) -> int:
        """The descriptor of a function that bcc has loaded by itself, for its name."""
        fd: int = self._bpf.funcs[name.encode()].fd
        return fd

    def map_fd(self, name: str) -> int:
        """The descriptor of a map; it stays bcc's."""
        fd: int = self._bpf[name.encode()].map_fd
        return fd

    def close(self) -> None:
        """Idempotent, and silent."""
        with _Aside():
            self._bpf.cleanup()
        # bcc keeps what it has made until the process ends, whether it is closed or not.
        atexit.unregister(self._bpf.cleanup)
        atexit.unregister(self._bpf.donothing)


def source_text() -> bytes:
    """The C source: kept beside the package in a checkout, and inside it when installed."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (os.path.join(package, "_bpf"), os.path.join(package, "..", "bpf")):
        try:
            with open(os.path.join(folder, _SOURCE), "rb") as file:
                return file.read()
        except FileNotFoundError:
            continue
    raise SourceError(f"{_SOURCE} is not where ksym-plugin keeps it", "reinstall ksym-plugin")


def layout_flags(path: str = _KERNEL_BTF) -> list[str]:
    """What the source wants to know of the kernel's structures; nothing without BTF."""
    try:
        with open(path, "rb") as file:
            blob = file.read()
    except OSError:
        return []
    ksym = btf.member_offsets(blob, "bpf_ksym")
    aux = btf.member_offsets(blob, "bpf_prog_aux")
    flags: list[str] = []
    after = [offset for offset in ksym.values() if offset > ksym.get("name", 0)]
    if "name" in ksym and after:
        flags.append(f"-DKSYM_NAME_SIZE={min(after) - ksym['name']}")
    if "prog" in ksym:
        flags.append(f"-DKSYM_PROG_AT={ksym['prog']}")
    if "ksym" in aux and "id" in aux:
        flags.append(f"-DKSYM_ID_AT={aux['id'] - aux['ksym']}")
    return flags


class _Aside:
    """Standard output and error go to ``text`` meanwhile, at descriptor level."""

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> _Aside:
        _flush()
        self._saved = [_duplicate(fd) for fd in _SAID_ON]
        file = os.memfd_create("said")
        # Not one of those that are about to be replaced, should they have been closed.
        self._file = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _SAID_ON[-1] + 1)
        os.close(file)
        for fd in _SAID_ON:
            # bcc runs modprobe, which is to be heard as well.
            os.dup2(self._file, fd, inheritable=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _flush()
        self.text = os.pread(self._file, _HEARD, 0).decode("utf-8", "backslashreplace")
        os.close(self._file)
        for fd, saved in zip(_SAID_ON, self._saved):
            os.close(fd)
            if saved >= 0:
                os.dup2(saved, fd, inheritable=True)
                os.close(saved)


def _duplicate(fd: int) -> int:
    """A copy out of the way; -1 if there is no such descriptor."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _SAID_ON[-1] + 1)
    except OSError:
        return -1


def _flush() -> None:
    """What C has printed and kept back goes to where it was meant to."""
    ctypes.CDLL(None).fflush(None)


def _refusal(error: Exception, said: str) -> SourceError:
    """What bcc's error means, from what it and its compiler said."""
    release = os.uname().release
    if _NO_HEADERS in said:
        return SourceError(
            f"the headers of this kernel ({release}) are not installed",
            f"install them (Debian and Ubuntu: apt install linux-headers-{release}; "
            "Fedora: dnf install kernel-devel), or use a kernel with CONFIG_IKHEADERS",
        )
    if "super-user" in str(error):
        return SourceError(
            "the kernel does not let this user load the probe",
            "run as root or with CAP_BPF and CAP_PERFMON, and without kernel lockdown",
        )
    # The compiler's first complaint says more than bcc does.
    lines = [line.strip() for line in said.splitlines() if "error:" in line] or [str(error)]
    gist = "".join(c if c.isprintable() else "?" for c in lines[0][:_QUOTED])
    return SourceError(
        f"bcc cannot load the probe ({gist})", "report this with the versions of kernel and bcc"
    )
