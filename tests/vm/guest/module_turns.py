"""Loads and unloads stock modules in turn, and writes down where their code was, and when.

    python3 -m tests.vm.guest.module_turns FILE DATA TURNS raid6_pq xor
    python3 -m tests.vm.guest.module_turns FILE DATA TURNS wp512 rmd160

Some are at work as they come: they measure their own functions. The others are hash
functions, which are made to work from here. Each loading is a line of JSON: the module, the
CLOCK_MONOTONIC ns around its coming and going, and its functions' addresses as kallsyms
lists them; those of its init code, which is let go when that is over, as its file has them.
Samples are taken as a module comes and while it works, not of what finds all that out.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import lzma
import os
import socket
import subprocess
import sys
import time

from elftools.elf.elffile import ELFFile

from tests.oracle.perfctl import Recording

#: What hashes with the module; the others need nobody.
ALGORITHMS = {"wp512": "wp512", "rmd160": "rmd160", "streebog_generic": "streebog512"}
_WORK_NS = 150_000_000


def functions(module: str) -> list[tuple[int, list[str]]]:
    """Start and all names of each function, ascending; the end of the code's page comes last."""
    starts: dict[int, list[str]] = {}
    sections = sections_of(module)
    words = ["grep", "-F", f"[{module}]", "/proc/kallsyms"]
    for line in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    ):
        address, kind, name, *_ = [*line.split(), "", "", ""]
        if not address or kind not in "tTwW":
            continue
        # After the init function its own section is listed until it is let go.
        section = max(one for one in sections if one[0] <= int(address, 16))[1]
        if not section.startswith(".init"):
            starts.setdefault(int(address, 16), []).append(name)
    rows = sorted(starts.items())
    return [*rows, ((rows[-1][0] | 4095) + 1, [])]


def sections_of(module: str) -> list[tuple[int, str]]:
    folder = f"/sys/module/{module}/sections"
    found = []
    for name in os.listdir(folder):
        with open(f"{folder}/{name}") as file:
            found.append((int(file.read(), 16), name))
    return found


def init_functions(module: str) -> list[tuple[int, int, str]]:
    """Start, end and name of each function of the init code."""
    bases = {name: address for address, name in sections_of(module)}
    return [
        (bases[section] + at, bases[section] + at + size, name)
        for section, at, size, name in init_symbols(module)
        if section in bases
    ]


@functools.cache
def init_symbols(module: str) -> list[tuple[str, int, int, str]]:
    """Section, offset, size and name of each function of the init code in the module's file."""
    found = subprocess.run(["modinfo", "-n", module], check=True, capture_output=True, text=True)
    path = found.stdout.strip()
    with lzma.open(path) if path.endswith(".xz") else open(path, "rb") as file:
        elf = ELFFile(io.BytesIO(file.read()))
    rows = []
    for symbol in elf.get_section_by_name(".symtab").iter_symbols():
        if symbol["st_info"]["type"] == "STT_FUNC":
            section = elf.get_section(symbol["st_shndx"]).name
            if section.startswith(".init"):
                rows.append((section, symbol["st_value"], symbol["st_size"], symbol.name))
    return rows


def work(algorithm: str) -> None:
    """Hash for a while."""
    data = bytes(8192)
    until = time.monotonic_ns() + _WORK_NS
    with socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) as kind:
        kind.bind(("hash", algorithm))
        with kind.accept()[0] as one:
            while time.monotonic_ns() < until:
                one.sendall(data)
                one.recv(64)


def remove(module: str) -> None:
    """Until it is no longer in use: a socket's end may take a moment."""
    give_up = time.monotonic() + 20
    while subprocess.run(["rmmod", module], capture_output=True).returncode:
        assert time.monotonic() < give_up, module
        time.sleep(0.01)


def turn(module: str, perf: Recording) -> dict:
    perf.enable()
    came = time.monotonic_ns()
    subprocess.run(["modprobe", module], check=True)
    there = time.monotonic_ns()
    perf.disable()
    found, init = functions(module), init_functions(module)
    if module in ALGORITHMS:
        perf.enable()
        work(ALGORITHMS[module])
        perf.disable()
    going = time.monotonic_ns()
    remove(module)
    times = (came, there, going, time.monotonic_ns())
    return {"module": module, "times": times, "functions": found, "init": init}


def main(path: str, data: str, turns: str, *modules: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) as kind:
        kind.bind(("hash", "sha256"))  # brings what all of them need
    perf = Recording(data, "mono", ["-p", str(os.getpid()), "-F", "499"])
    perf.disable()
    with open(path, "w") as file:
        for number in range(int(turns)):
            file.write(json.dumps(turn(modules[number % len(modules)], perf)) + "\n")
            file.flush()
            os.fsync(file.fileno())
    perf.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
