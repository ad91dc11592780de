"""Which modules the kernel holds, by /proc/modules, and uevents of those that come and go."""

from __future__ import annotations

import contextlib
import errno
import struct

from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

LISTING = "/proc/modules"
LOADING = "Loading"
UNLOADING = "Unloading"

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_KERNEL_PORT = 0
_SO_ATTACH_FILTER = 26
_SO_RCVBUFFORCE = 33
#: Modules can come by the hundred: their events wait here until they are read.
_ROOM = 4 << 20
#: The longest uevent (UEVENT_BUFFER_SIZE in linux/kobject.h).
_LONGEST = 2304

# Of classic BPF (linux/bpf_common.h): load four bytes, compare, return.
_LOAD = 0x20
_IS = 0x15
_RETURN = 0x06
#: Devices come by the thousand: their events must neither wake this process nor take room.
#: Operation, jumps if equal and if not, operand.
_FILTER = (
    (_LOAD, 0, 0, 0),
    (_IS, 0, 2, int.from_bytes(b"add@", "big")),
    (_LOAD, 0, 0, 4),
    (_IS, 3, 4, int.from_bytes(b"/mod", "big")),
    (_IS, 0, 3, int.from_bytes(b"remo", "big")),
    (_LOAD, 0, 0, 7),
    (_IS, 0, 1, int.from_bytes(b"/mod", "big")),
    (_RETURN, 0, 0, 0xFFFF_FFFF),
    (_RETURN, 0, 0, 0),
)


class Uevents:
    """The kernel's uevents about modules, from now on. Needs no privilege; SourceError."""

    def __init__(self) -> None:
        # Here, so that who reads the list alone does not pay for it.
        import socket

        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT)
            try:
                listen_to_modules(self._socket)
                self._socket.bind((0, _KERNEL_GROUP))
                _make_room(self._socket)
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            problem = f"the kernel's uevents cannot be listened to ({error.strerror})"
            raise SourceError(problem) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> tuple[list[tuple[bool, str]], bool]:
        """Events since the last call, as (whether it was added, name); whether some were lost."""
        found: list[tuple[bool, str]] = []
        lost = False
        while True:
            try:
                data, sender = self._socket.recvfrom(_LONGEST)
            except BlockingIOError:
                return found, lost
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            event = parse(data)
            if event is not None and sender[0] == _KERNEL_PORT:
                found.append(event)

    def close(self) -> None:
        self._socket.close()


def listen_to_modules(receiver: socket.socket) -> None:
    """Have the kernel drop what ``parse`` has no use for, where it can."""
    import ctypes
    import socket

    code = b"".join(struct.pack("=HBBI", *step) for step in _FILTER)
    steps = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(_FILTER), ctypes.addressof(steps))
    with contextlib.suppress(OSError):
        receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _make_room(receiver: socket.socket) -> None:
    import socket

    try:
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
    except OSError:  # Without CAP_NET_ADMIN it is as large as others' are.
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)


def parse(data: bytes) -> tuple[bool, str] | None:
    """Whether a module was added, and its name; None for all that is not about a module."""
    action, separator, name = data.partition(b"\0")[0].partition(b"@/module/")
    # What lies under a module are its holders and parameters.
    if not separator or action not in (b"add", b"remove") or b"/" in name:
        return None
    return action == b"add", name.decode("ascii", "replace")


class Listed:
    """A line of /proc/modules: a module's name, size, state and base address."""

    def __init__(self, name: str, size: int, state: str, base: int) -> None:
        self.name = name
        self.size = size
        self.state = state
        self.base = base


def read_listing(path: str = LISTING) -> dict[str, Listed]:
    """The modules by name; ``base`` is 0 where the kernel hides addresses. OSError.

    A line is: name, bytes, use count, users, state, address, perhaps taints.
    """
    found = {}
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            fields = line.split()
            try:
                name, size, state, base = fields[0], int(fields[1]), fields[4], int(fields[5], 16)
            except (IndexError, ValueError):
                continue
            found[name] = Listed(name, size, state, base)
    return found


def extents(path: str = LISTING) -> dict[str, tuple[int, int]]:
    """Base address and bytes by module name; empty where unreadable, hidden or built in.

    A module whose init may still run is left out: the code for that lies elsewhere.
    """
    try:
        listed = read_listing(path).values()
    except OSError:
        return {}
    return {one.name: (one.base, one.size) for one in listed if one.base and one.state != LOADING}
