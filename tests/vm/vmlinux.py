"""``python -m tests.vm.vmlinux``: a stock kernel's own names and binutils' lines, and ours.

A guest boots each stock Debian kernel and hands over its kallsyms. 1,000 random addresses in
its text are then named, and their lines told, from the vmlinux of the kernel's -dbg package,
here on the host. The first time downloads 300 MB a kernel, and 600 MB stay beside the image.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from unittest import mock

from ksym_plugin.kernel.elf import ElfError
from ksym_plugin.kernel.identity import build_id
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.vmlinux import open_image, open_lines
from ksym_plugin.timeline.symbols import Symbol
from tests.vm.machine import cache, children
from tests.vm.machine.__main__ import KERNELS, missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ksym_plugin.kernel.vmlinux import Image

REPO = os.path.dirname(os.path.dirname(os.path.dirname(cache.HERE)))
OUT = os.path.join("build", "vm", "vmlinux")
# cat, as files of /proc have no size.
JOB = "cat /proc/kallsyms >/job/out/kallsyms; cat /sys/kernel/notes >/job/out/notes"
BOUNDS = ("_stext", "_etext")
ADDRESSES, SEED = 1000, 6
GONE = 3
#: What ours asks, and what it is held against.
OURS, OTHER = "llvm-addr2line", "addr2line"
#: addr2line of binutils 2.40 gives lines of headers to the unit's own file where a DWARF 5
#: program does not say the file; that much of all is let pass.
MOST_MISTAKEN = ADDRESSES // 50
#: kallsyms also has labels within functions.
MOST_LABELS = ADDRESSES // 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.vmlinux", description=__doc__)
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this one")
    kernels = parser.parse_args().kernel or KERNELS
    os.chdir(REPO)
    lacking = [tool for tool in (OURS, OTHER, "dpkg-deb", "apt-get") if not shutil.which(tool)]
    problem = f"not installed: {' '.join(lacking)}" if lacking else missing()
    if problem:
        return cannot(problem)
    try:
        images = cache.folder()
        return max([one(images, kernel) for kernel in kernels])
    except (children.Failed, OSError, subprocess.CalledProcessError) as error:
        return cannot(str(error))


def cannot(problem: str) -> int:
    """Skipped for a user, failed on CI."""
    is_ci = os.environ.get("CI", "") in ("true", "1")
    print(f"{'FAILED' if is_ci else 'SKIPPED'}: vmlinux was not compared: {problem}")
    return 1 if is_ci else 0


def one(images: str, kernel: str) -> int:
    began = time.monotonic()
    vmlinux, release = debug_file(images, kernel)
    command = [sys.executable, "-m", "tests.vm.machine", "--kernel", kernel, "--out", OUT]
    subprocess.run([*command, "--shell", JOB], check=True)
    # A cache of its own: what is compared is what is in the file.
    with tempfile.TemporaryDirectory() as own, mock.patch.dict(os.environ, XDG_CACHE_HOME=own):
        problems = compared(vmlinux, os.path.join(OUT, kernel))
    for problem in problems:
        print(f"FAILED: {release}: {problem}")
    verdict = "FAILED" if problems else "vmlinux agrees"
    print(f"vm: {release}: {verdict} in {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


def debug_file(images: str, kernel: str) -> tuple[str, str]:
    """The vmlinux of the kernel in the image, downloaded if it is not there, and its release."""
    file = os.path.join(images, f"vmlinux-{kernel}")
    with open(os.path.join(images, "versions"), encoding="ascii") as versions:
        rows = [line.split() for line in versions if line.startswith(f"linux-image-{kernel}.")]
    image, version = rows[0]
    if not os.path.exists(file):
        made = subprocess.run(
            [os.path.join(cache.HERE, "debug-kernel"), image, version, file], check=False
        )
        if made.returncode == GONE:
            raise children.Failed(
                f"the archive has {image}-dbg {version} no more; remove {images} for a newer image"
            )
        made.check_returncode()
    return file, image[len("linux-image-") :]


def compared(vmlinux: str, guest: str) -> list[str]:
    """Prints what agrees; what should have and does not."""
    listing = os.path.join(guest, "kallsyms")
    names = oracle(listing)
    first, last = (next(at for at, held in names.items() if one in held) for one in BOUNDS)
    pick = random.Random(SEED)
    addresses = [pick.randrange(first, last) for _ in range(ADDRESSES)]
    behind = Kallsyms.load(listing, None)
    build = build_id(os.path.join(guest, "notes"))
    said: list[str] = []
    try:
        alone = open_image(vmlinux, behind.text_start, build, None, said.append)
        both = open_image(vmlinux, behind.text_start, build, behind, said.append)
    except ElfError as error:
        return [str(error)]
    if said:
        return said
    return [
        *named(both, names, addresses, 0),
        *named(alone, names, addresses, MOST_LABELS),
        *lines(alone, addresses),
    ]


def oracle(listing: str) -> dict[int, set[str]]:
    """The names at each address of the core image, sorted, by a reading of its own."""
    names: dict[int, set[str]] = {}
    with open(listing, encoding="utf-8") as file:
        rows = [line.split() for line in file]
    for row in sorted(row for row in rows if len(row) == 3):
        names.setdefault(int(row[0], 16), set()).add(row[2])
    return names


def named(
    image: Image, names: dict[int, set[str]], addresses: Sequence[int], most_labels: int
) -> list[str]:
    starts = list(names)
    agree, behind_ends, unnamed, labels, wrong = 0, 0, 0, 0, []
    for address in addresses:
        start = starts[bisect_right(starts, address) - 1]
        found = image.find(address)
        if not isinstance(found, Symbol) and all(map(is_end, names[start])):
            behind_ends += 1
        elif not isinstance(found, Symbol):
            unnamed += 1
        elif found.start == start and found.name in names[start]:
            agree += 1
        elif found.start < start <= address < found.end:
            labels += 1
        else:
            wrong.append(f"{address:#x} is {found.name}, not {names[start]}")
    behind = "with kallsyms behind it" if not most_labels else "by the file alone"
    print(
        f"names {behind}: {agree} agree, {behind_ends} behind a section's end, "
        f"{unnamed} in no function of the file, "
        f"{labels} at labels within one, {len(wrong)} wrong"
    )
    if labels > most_labels or (unnamed and not most_labels):
        wrong.append(f"{unnamed} without a name, {labels} named by the function around")
    return wrong


def is_end(name: str) -> bool:
    """Whether a name in kallsyms is where a section ends, with padding behind it."""
    return re.fullmatch("_e(init)?text|__.*text_end", name) is not None


def lines(image: Image, addresses: Sequence[int]) -> list[str]:
    began = time.monotonic()
    said: list[str] = []
    ours = open_lines(image, said.append, may_raise=False)
    found = [] if ours is None else [ours.line(address) for address in addresses]
    if ours is not None:
        ours.close()
    between = time.monotonic()
    asked = "\n".join(f"{address - image.offset:#x}" for address in addresses)
    told = subprocess.run(
        [OTHER, "-e", image.file.path], input=asked, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    taken = time.monotonic() - between
    agree, none, mistaken, wrong = 0, 0, 0, said
    for address, line, other in zip(addresses, found, told):
        file, number = other.split(" ")[0].rsplit(":", 1)
        theirs = (os.path.normpath(file), int(number)) if number not in ("?", "0") else None
        mine = line and (line.file, line.line)
        if mine == theirs:
            agree, none = agree + (mine is not None), none + (mine is None)
        elif mine and theirs and mine[1] == theirs[1]:
            mistaken += 1
        else:
            wrong.append(f"{address:#x} is at {mine}, {OTHER} says {theirs}")
    print(
        f"lines: {agree} agree, {none} have none, {mistaken} in another file at the same line, "
        f"{len(wrong)} wrong; {OTHER} took {taken:.1f} s, {OURS} with ours "
        f"{between - began:.1f} s"
    )
    if mistaken > MOST_MISTAKEN or agree < ADDRESSES // 2:
        wrong.append(f"only {agree} lines agree, {mistaken} are in another file")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
