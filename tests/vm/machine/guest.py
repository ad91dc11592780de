"""One guest: a copy of the image with a job in it, booted, and what came back."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import tarfile
import tempfile
import time

from tests.vm.machine import cache, children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

QEMU = "qemu-system-x86_64"

#: Times a guest that never came up is booted. One that came up is never booted again: that
#: could hide a failure.
BOOTS = 3
#: What a boot may take, which is quiet: on a machine that others keep busy, minutes.
BOOT_SECONDS = 300

NEVER_UP = "never came up"
DIED = "died"
SILENT = "printed nothing for too long"
LATE = "took too long"

# thread=single: two emulated CPUs in one thread, because patched kernel text is not seen at
# once by the other CPU's thread and 6.12 has died of that. -cx16: QEMU 7.2 emulates
# cmpxchg16b in a way that ends 6.12 in a double fault.
_MACHINE = """-accel tcg,thread=single -cpu max,-cx16 -smp 2 -m 2G
    -nodefaults -nographic -no-reboot -serial stdio""".split()
_KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 oops=panic no_timer_check nowatchdog "
    "rcupdate.rcu_cpu_stall_suppress=1 mitigations=off "
    "root=/dev/nvme0n1 rootfstype=ext4 rw init=/sbin/guest-init"
)


class Limits:
    """What a guest may take once it is up, in seconds: without printing anything, and in all."""

    __slots__ = ("overall", "silence")

    def __init__(self, silence: float, overall: float) -> None:
        self.silence = silence
        self.overall = overall


class Outcome:
    """How it went: ``status`` is the job's own, or None for a guest that was ``lost``."""

    __slots__ = ("lost", "release", "seconds", "status")

    def __init__(self, status: int | None, lost: str, release: str, seconds: float) -> None:
        self.status = status
        self.lost = lost
        self.release = release
        self.seconds = seconds


def run(
    images: str,
    kernel: str,
    job: str,
    files: Sequence[str],
    out: str,
    limits: Limits,
    show: Callable[[str], None],
) -> Outcome:
    """Run the bash script ``job`` in a copy of ``files`` (relative to here), on that kernel.

    What it leaves in ``/job/out`` is then in ``out``, beside ``console.log``, also when it was
    cut off by one of its ``limits``. ``show`` gets its output line by line. Raises
    children.Failed or OSError when no guest could be started at all.
    """
    began = time.monotonic()
    cache.room(images, cache.GUEST_BYTES)
    with tempfile.TemporaryFile(dir=images) as disk:  # it has no name to stay behind
        path = _path(disk)
        children.run(["cp", os.path.join(images, "image"), path], fds=[disk.fileno()])
        _put_in(disk, job, files)
        with open(os.path.join(out, "console.log"), "wb") as log:
            for _ in range(BOOTS):
                boot = Boot(_command(images, kernel, path), disk.fileno(), log, show, limits)
                boot.watch()
                if boot.lost != NEVER_UP:
                    break
        status = _take_out(disk, out)
    lost = "" if status is not None else boot.lost or DIED
    return Outcome(status, lost, boot.release, time.monotonic() - began)


def _path(file: BinaryIO) -> str:
    """Its name for a child that has the descriptor under the same number."""
    return f"/proc/self/fd/{file.fileno()}"


def _command(images: str, kernel: str, disk: str) -> list[str]:
    return [
        QEMU,
        *_MACHINE,
        *("-kernel", os.path.join(images, f"vmlinuz-{kernel}"), "-append", _KERNEL_LINE),
        *("-drive", f"if=none,id=d0,file={disk},format=raw,cache=unsafe"),
        *("-device", "nvme,drive=d0,serial=root"),
    ]


def _put_in(disk: BinaryIO, job: str, files: Sequence[str]) -> None:
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            script = tarfile.TarInfo("job")
            script.size = len(job.encode())
            tar.addfile(script, io.BytesIO(job.encode()))
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # edited at this very moment
                    tar.add(file, os.path.join("work", file), recursive=False)
        packed.flush()
        write = ["debugfs", "-w", "-R", f"write {_path(packed)} /job/in.tar", _path(disk)]
        said = children.run(write, fds=[disk.fileno(), packed.fileno()])
    if "Allocated inode" not in said:  # its status is 0 in any case
        raise children.Failed(f"the job could not be written into the image: {said.strip()}")


def _take_out(disk: BinaryIO, out: str) -> int | None:
    """The job's results into ``out``; its exit status, if the guest got so far."""
    fds, path = [disk.fileno()], _path(disk)
    # 1 and 2: mended, as is usual for a guest that was cut off.
    children.run(["e2fsck", "-fy", path], fds=fds, fine=(0, 1, 2))
    children.run(["debugfs", "-R", "rdump /job/out .", path], fds=fds, cwd=out)
    inner = os.path.join(out, "out")
    if os.path.isdir(inner):
        for name in os.listdir(inner):
            os.rename(os.path.join(inner, name), os.path.join(out, name))
        os.rmdir(inner)
    said = children.run(["debugfs", "-R", "cat /job/status", path], fds=fds).split()
    return int(said[-1]) if said and said[-1].isdigit() else None


class Boot:
    """QEMU's run from its start to its end, watched through the guest's console."""

    def __init__(
        self,
        command: list[str],
        disk: int,
        log: BinaryIO,
        show: Callable[[str], None],
        limits: Limits,
    ) -> None:
        self.release = ""
        self.lost = ""
        self._said = ""
        self._begun = b""
        self._until = time.monotonic() + BOOT_SECONDS
        self._done = False
        self._cut = ""
        self._log = log
        self._show = show
        self._limits = limits
        self._child = children.start(command, fds=[disk])

    def watch(self) -> None:
        """Until QEMU has ended, which it is made to do when one of its limits is reached."""
        assert self._child.stdout is not None
        with self._child.stdout as console:
            while data := self._read(console.fileno()):
                self._log.write(data)
                self._log.flush()
                *whole, self._begun = (self._begun + data).split(b"\n")
                for raw in whole:
                    self._line(raw)
        if self._begun:
            self._line(self._begun)
        status = children.end(self._child)
        if self.release:
            self.lost = self._cut
        elif status > 0:  # not a guest's end: QEMU itself gave up
            raise children.Failed(f"{QEMU} ended with status {status}: {self._said.strip()}")
        else:
            self.lost = NEVER_UP

    def _read(self, console: int) -> bytes:
        """What the console says next; nothing when QEMU has ended."""
        left = self._until - time.monotonic()
        limit = min(left, self._limits.silence) if self.release else left
        # Not select(2), which knows no descriptor above 1023.
        poller = select.poll()
        poller.register(console, select.POLLIN)
        if not self._cut and (left <= 0 or not poller.poll(max(0, limit) * 1000)):
            self._cut = LATE if limit == left else SILENT
            self._child.kill()
        return os.read(console, 1 << 16)

    def _line(self, raw: bytes) -> None:
        line = self._said = raw.decode(errors="replace").rstrip()
        # The firmware leaves escape sequences, and the kernel its messages, on any line.
        up = not self.release and re.search(r"GUEST_UP (\S+)", line)
        if up:
            self.release = up[1]
            self._until = time.monotonic() + self._limits.overall
        elif "GUEST_DONE" in line:
            self._done = True
        elif self.release and not self._done:
            self._show(line)
