"""bpf/ksym_events.c, compiled and loaded by bcc in a process of its own.

So what bcc keeps until its process ends, and the compiler's 130 MB, are given back at once; and
this process reads what it prints.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import sys
from contextlib import closing

from ksym_plugin.kernel import btf, privileges
from ksym_plugin.kernel.worker import Worker
from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ksym_plugin.kernel.worker import Connection

#: Where distributions keep Python packages: Debian and its kin, then all others.
_SYSTEM = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/lib64/python3*/site-packages",
)
#: A file that iovisor's bcc has, and no other package of that name.
_MARK = "libbcc.py"
#: The system's is imported under this name: ``bcc`` may be another package here.
_PRIVATE_NAME = "ksym_plugin._system_bcc"
_INSTALL = (
    "install iovisor's bindings (Debian and Ubuntu: apt install python3-bpfcc; "
    "Fedora: dnf install python3-bcc; Arch: pacman -S python-bcc)"
)
_SOURCE = "ksym_events.c"
KERNEL_BTF = "/sys/kernel/btf/vmlinux"
#: How much of what bcc and its compiler print is read, and how much of it is quoted.
_MOST_OUTPUT = 65536
_LONGEST_QUOTE = 200
_NO_HEADERS = "kernel headers"


class BccProgram:
    """The descriptors of programs and maps; whatever bcc attached stays so while it is open.

    SourceError if it cannot be compiled or loaded.
    """

    def __init__(self, flags: list[str], programs: tuple[str, ...], maps: tuple[str, ...]) -> None:
        request = {
            # What this process can import, bcc's process can.
            "path": [os.path.abspath(folder) for folder in sys.path],
            "text": source_text(),
            "flags": [*flags, *_layout_flags()],
            "programs": programs,
            "maps": maps,
        }
        try:
            self._fds = _compiled(request)
            if len(self._fds) < len(programs) + len(maps):
                # The kernel passes on as many as the limit leaves room for.
                self.close()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            raise SourceError(
                f"the probe cannot be compiled in a process of its own ({error.strerror})",
                "raise the limits on processes, files and memory (ulimit -u, -n, -v)",
            ) from error
        self.programs = self._fds[: len(programs)]
        self.maps = dict(zip(maps, self._fds[len(programs) :]))

    def close(self) -> None:
        """Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def _compiled(request: dict[str, Any]) -> list[int]:
    """The descriptors that bcc's process sends."""
    memfd = os.memfd_create("output", os.MFD_CLOEXEC)
    with open(memfd, "rb") as output, closing(Worker(compile_and_load, output=memfd)) as worker:
        try:
            worker.send(request)
            raised = worker.receive()
        except (EOFError, ConnectionError):
            raised = "its process died"
        if raised:
            output.seek(0)
            printed = output.read(_MOST_OUTPUT).decode("utf-8", "backslashreplace")
            raise _refusal(raised, printed)
        fds, worker.fds = worker.fds, []
        return fds


def compile_and_load(parent: Connection) -> None:
    """What bcc's process does: send what bcc raised, if not "", with the descriptors."""
    request = parent.receive()
    sys.path[:] = request["path"]
    raised, fds = "", []
    try:
        bcc = load()
        bpf: Any = bcc.BPF(text=request["text"].encode(), cflags=request["flags"])
        for name in (name.encode() for name in request["programs"]):
            # bcc has loaded and attached by itself what it knows by its name.
            function = bpf.funcs.get(name) or bpf.load_func(name, bcc.BPF.KPROBE)
            fds.append(function.fd)
        fds += [bpf[name.encode()].map_fd for name in request["maps"]]
        # Last what holds the programs attached.
        fds += bpf.kfunc_entry_fds.values()
    except SourceError:
        raise
    except Exception as error:  # noqa: BLE001 - bcc raises nothing narrower
        raised = str(error) or type(error).__name__
    # Not all that bcc prints has left C's buffers.
    ctypes.CDLL(None).fflush(None)
    parent.send(raised, fds)
    # Past bcc's own clean-up: it prints, and the kernel does it better.
    os._exit(0)


def load() -> ModuleType:
    """iovisor's bcc, imported. SourceError where it is not installed or does not work."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("bcc", sys.path)
    own = [] if spec is None else spec.submodule_search_locations or []
    found = [("bcc", folder) for folder in own]
    for pattern in _SYSTEM:
        system = sorted(glob.glob(os.path.join(pattern, "bcc")), reverse=True)
        found += [(_PRIVATE_NAME, folder) for folder in system]
    for name, folder in found:
        if not os.path.exists(os.path.join(folder, _MARK)):
            continue
        try:
            return sys.modules.get(name) or _import(name, folder)
        except (ImportError, OSError) as error:
            # OSError is the dynamic loader's.
            raise SourceError(
                f"bcc in {folder} cannot be imported ({error})",
                "reinstall python3-bpfcc and libbpfcc",
            ) from error
    if spec is None:
        raise SourceError("bcc is not installed", _INSTALL)
    raise SourceError(
        f"the bcc in {os.path.dirname(spec.origin or '') or 'this environment'} is PyPI's, "
        "which has nothing to do with BPF",
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
    # It is written for another Python: this one may warn of its strings, and must not leave
    # compiled files in the distribution's folder.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    except BaseException:
        for part in [part for part in sys.modules if f"{part}.".startswith(f"{name}.")]:
            del sys.modules[part]
        raise
    finally:
        sys.dont_write_bytecode = writes_none
    return module


def source_text() -> str:
    """The C source: beside the package in a checkout, and inside it when installed."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (os.path.join(package, "_bpf"), os.path.join(package, "..", "bpf")):
        try:
            with open(os.path.join(folder, _SOURCE), encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            continue
    raise SourceError(f"{_SOURCE} is not where ksym-plugin keeps it", "reinstall ksym-plugin")


def _layout_flags() -> list[str]:
    """The offsets in the kernel's structures that the source needs; none without BTF."""
    try:
        with open(KERNEL_BTF, "rb") as file:
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


def _refusal(raised: str, output: str) -> SourceError:
    """What an exception of bcc's means, by its words and what the compiler printed."""
    release = os.uname().release
    if _NO_HEADERS in output:
        return SourceError(
            f"the headers of this kernel ({release}) are not installed",
            f"install them (Debian and Ubuntu: apt install linux-headers-{release}; "
            "Fedora: dnf install kernel-devel), or use a kernel with CONFIG_IKHEADERS",
        )
    if "super-user" in raised:
        return SourceError(
            "the kernel does not let this user load the probe",
            f"{privileges.LOAD_PROBES}, and without kernel lockdown",
        )
    if os.strerror(errno.ENOMEM) in raised:
        return SourceError(
            "the kernel has no memory for the probe's ring", "ask for a smaller one, or free some"
        )
    # The compiler's first error says more than bcc does.
    lines = [line.strip() for line in output.splitlines() if "error:" in line] or [raised]
    gist = "".join(c if c.isprintable() else "?" for c in lines[0][:_LONGEST_QUOTE])
    return SourceError(
        f"bcc cannot load the probe ({gist})", "report this with the versions of kernel and bcc"
    )
