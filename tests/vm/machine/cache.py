"""The image and the kernels, made once for each recipe and kept outside the checkout."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time

from tests.vm.machine import children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = os.path.dirname(os.path.abspath(__file__))
RECIPE = ("build-image", "guest-init")

#: What one build takes while it is under way, and what one guest may fill.
BUILD_BYTES = 3 << 30
GUEST_BYTES = 1 << 30

_BUILDING = "build-"
_UNUSED_DAYS = 14


def root() -> str:
    """The folder of all images: ``$KSYM_VM_CACHE``, else one under the user's cache."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("KSYM_VM_CACHE") or os.path.join(own, "ksym-plugin", "vm")


def key() -> str:
    """The recipe in short: a recipe that changed has another one."""
    digest = hashlib.sha256()
    for name in RECIPE:
        with open(os.path.join(HERE, name), "rb") as file:
            digest.update(file.read() + b"\0")
    return digest.hexdigest()[:12]


def have() -> bool:
    return os.path.isdir(os.path.join(root(), key()))


def folder() -> str:
    """The folder of the image and the kernels of this recipe, built now if it was not yet."""
    base = root()
    place = os.path.join(base, key())
    os.makedirs(base, exist_ok=True)
    if not os.path.isdir(place):
        with _alone(base):
            if not os.path.isdir(place):
                _sweep(base)
                _build(base, place)
    with contextlib.suppress(OSError):
        os.utime(place)
    return place


def room(place: str, wanted: int) -> None:
    """Failed when the file system of ``place`` has less than ``wanted`` bytes left."""
    left = shutil.disk_usage(place).free
    if left < wanted:
        raise children.Failed(f"{place} has {left >> 20} MiB left; {wanted >> 20} are needed")


@contextlib.contextmanager
def _alone(base: str) -> Iterator[None]:
    with open(os.path.join(base, "lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("vm: another run is making the image; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(base: str) -> None:
    """Away with builds that were cut off (the lock is ours) and images long unused."""
    oldest = time.time() - _UNUSED_DAYS * 86400
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if name.startswith(_BUILDING) or (os.path.isdir(path) and os.stat(path).st_mtime < oldest):
            shutil.rmtree(path)


def _build(base: str, place: str) -> None:
    room(base, BUILD_BYTES)
    print(f"vm: making the guests' image in {base}: downloads about 220 MB, keeps 690 MB")
    print("vm: this is done once; it takes one to three minutes", flush=True)
    began = time.monotonic()
    work = tempfile.mkdtemp(prefix=_BUILDING, dir=base)
    try:
        # Its own process namespace: whoever leads it takes all the others along, and what
        # they had mounted.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        children.run([*command, os.path.join(HERE, "build-image"), work])
        os.chmod(work, 0o755)
        os.rename(work, place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    print(f"vm: image made in {time.monotonic() - began:.0f} s", flush=True)
