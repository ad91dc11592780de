"""bpf/ksym_events.c, compiled and loaded by bcc in a child process."""

from __future__ import annotations

import errno
import glob
import json
import os
import sys
from array import array
from contextlib import suppress

from ksym_plugin.kernel import btf
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from types import ModuleType
    from typing import Any, Final

#: Where distributions keep Python packages: Debian and its kin, then all others.
_SYSTEM: Final = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/lib64/python3*/site-packages",
)
#: What iovisor's has, and no other.
_MARK: Final = "libbcc.py"
#: The system's is imported under a name of its own: ``bcc`` may be somebody else's here.
_PRIVATE_NAME: Final = "ksym_plugin._system_bcc"
_INSTALL: Final = (
    "install iovisor's bindings (Debian and Ubuntu: apt install python3-bpfcc; "
    "Fedora: dnf install python3-bcc; Arch: pacman -S python-bcc)"
)


def load() -> ModuleType:
    """iovisor's bcc, imported. SourceError where it is not installed or does not work."""
    folder, other = _here()
    name = "bcc"
    if not folder:
        folder, name = _in_system(), _PRIVATE_NAME
    if not folder:
        raise _missing(other)
    try:
        return sys.modules.get(name) or _import(name, folder)
    except (ImportError, OSError) as error:
        # OSError is the dynamic loader's.
        raise SourceError(
            f"bcc in {folder} cannot be imported ({error})", "reinstall python3-bpfcc and libbpfcc"
        ) from error


def _here() -> tuple[str, str]:
    """Where this Python's own bcc is if it is iovisor's; and if not, where that other one is."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("bcc", sys.path)
    if spec is None:
        return "", ""
    for folder in spec.submodule_search_locations or ():
        if os.path.exists(os.path.join(folder, _MARK)):
            return folder, ""
    return "", os.path.dirname(spec.origin or "") or "this environment"


def _in_system() -> str:
    for pattern in _SYSTEM:
        for mark in sorted(glob.glob(os.path.join(pattern, "bcc", _MARK)), reverse=True):
            return os.path.dirname(mark)
    return ""


def _missing(other: str) -> SourceError:
    if not other:
        return SourceError("bcc is not installed", _INSTALL)
    return SourceError(
        f"the bcc in {other} is PyPI's, which has nothing to do with BPF",
        f"{_INSTALL}; the other one may stay, or go by: {sys.executable} -m pip uninstall bcc",
    )


def _import(name: str, folder: str) -> ModuleType:
    import warnings
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(folder, "__init__.py")
    spec = spec_from_file_location(name, file, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {file}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    # Written for another Python: this one may warn of its strings, and must not leave its
    # compiled files among the distribution's.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    except BaseException:
        for known in [known for known in sys.modules if f"{known}.".startswith(f"{name}.")]:
            del sys.modules[known]
        raise
    finally:
        sys.dont_write_bytecode = writes_none
    return module


_SOURCE: Final = "ksym_events.c"
_KERNEL_BTF: Final = "/sys/kernel/btf/vmlinux"
#: Under -I, which keeps the working directory's modules out from the first import on.
_CHILD: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ksym_plugin.sources.bcc_child import main; main(int(sys.argv[1]))"
)
#: Two programs, two maps, and two links.
_MOST_FDS: Final = 8
#: How much of what is said is looked at, and how much of it repeated.
_HEARD: Final = 65536
_QUOTED: Final = 200
_NO_HEADERS: Final = "kernel headers"


class BccProgram:
    """The descriptors of programs and maps; whatever bcc attached stays so while it is open.

    SourceError if it cannot be compiled or loaded, OSError if this process may not have so
    many descriptors.
    """

    def __init__(self, flags: list[str], programs: tuple[str, ...], maps: tuple[str, ...]) -> None:
        request = {
            "text": source_text(),
            "flags": [*flags, *layout_flags()],
            "programs": programs,
            "maps": maps,
        }
        self._fds = _ask_child(request)
        if len(self._fds) < len(programs) + len(maps):
            # The kernel passes on as many as the limit leaves room for.
            self.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.programs = self._fds[: len(programs)]
        self.maps = dict(zip(maps, self._fds[len(programs) :]))

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def _ask_child(request: dict[str, Any]) -> list[int]:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = os.memfd_create("said")
    try:
        with ours:
            with theirs:
                child = _start(theirs.fileno(), said)
            try:
                with suppress(BrokenPipeError):
                    ours.send(json.dumps(request).encode())
                data, fds = _receive(ours)
            except BaseException:
                child.kill()
                raise
            finally:
                child.wait()
        answer = json.loads(data) if data else {"raised": "its process died"}
        if answer:
            text = os.pread(said, _HEARD, 0).decode("utf-8", "backslashreplace")
            raise _refusal(answer, text)
        return fds
    finally:
        os.close(said)


def _receive(ours: socket.socket) -> tuple[bytes, list[int]]:
    """The answer, empty if there is none, and the descriptors that came with it."""
    import socket

    fds = array("i")
    room = socket.CMSG_LEN(_MOST_FDS * fds.itemsize)
    # Not socket.recv_fds(): it has a parameter for the flag, and leaves it out.
    data, parts, _, _ = ours.recvmsg(_HEARD, room, socket.MSG_CMSG_CLOEXEC)
    for _, _, part in parts:
        fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


def _start(fd: int, said: int) -> subprocess.Popen[bytes]:
    """The child, which looks for modules where this process does."""
    import subprocess

    path = [os.path.abspath(folder) for folder in sys.path]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _CHILD, str(fd), json.dumps(path)],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=(fd,),
        # What a terminal sends is for the parent to answer.
        start_new_session=True,
    )


def source_text() -> str:
    """The C source: kept beside the package in a checkout, and inside it when installed."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (os.path.join(package, "_bpf"), os.path.join(package, "..", "bpf")):
        try:
            with open(os.path.join(folder, _SOURCE), encoding="ascii") as file:
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


def _refusal(answer: dict[str, str], said: str) -> SourceError:
    """What the child's answer means, with what bcc and its compiler said."""
    if "problem" in answer:
        return SourceError(answer["problem"], answer["remedy"])
    release = os.uname().release
    if _NO_HEADERS in said:
        return SourceError(
            f"the headers of this kernel ({release}) are not installed",
            f"install them (Debian and Ubuntu: apt install linux-headers-{release}; "
            "Fedora: dnf install kernel-devel), or use a kernel with CONFIG_IKHEADERS",
        )
    raised = answer["raised"]
    if "super-user" in raised:
        return SourceError(
            "the kernel does not let this user load the probe",
            "run as root or with CAP_BPF and CAP_PERFMON, and without kernel lockdown",
        )
    if os.strerror(errno.ENOMEM) in raised:
        return SourceError(
            "the kernel has no memory for the probe's ring", "ask for a smaller one, or free some"
        )
    # The compiler's first complaint says more than bcc does.
    lines = [line.strip() for line in said.splitlines() if "error:" in line] or [raised]
    gist = "".join(c if c.isprintable() else "?" for c in lines[0][:_QUOTED])
    return SourceError(
        f"bcc cannot load the probe ({gist})", "report this with the versions of kernel and bcc"
    )
