"""Loads and unloads stock modules in turn, and writes down where their code was, and when.

    python3 -m tests.vm.guest.module_turns FILE TURNS raid6_pq xor
    python3 -m tests.vm.guest.module_turns FILE TURNS wp512 rmd160

Some are at work as they come: they measure their own functions. The others are hash
functions, which are made to work from here. Each loading is a line of JSON: the module, the
CLOCK_MONOTONIC ns around its coming and going, and its functions' addresses as kallsyms
lists them, but for those of sections that are let go after the init function.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

#: What hashes with the module; the others need nobody.
ALGORITHMS = {"wp512": "wp512", "rmd160": "rmd160", "streebog_generic": "streebog512"}
_WORK_NS = 60_000_000


def functions(module: str) -> list[tuple[int, list[str]]]:
    """Start and all names of each function, ascending; the end of the code's page comes last."""
    starts: dict[int, list[str]] = {}
    sections = sections_of(module)
    with open("/proc/kallsyms") as table:
        for line in table:
            address, kind, name, *of = line.split()
            if of != [f"[{module}]"] or kind not in "tTwW":
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


def turn(module: str) -> dict:
    came = time.monotonic_ns()
    subprocess.run(["modprobe", module], check=True)
    there = time.monotonic_ns()
    found = functions(module)
    if module in ALGORITHMS:
        work(ALGORITHMS[module])
    going = time.monotonic_ns()
    remove(module)
    times = (came, there, going, time.monotonic_ns())
    return {"module": module, "times": times, "functions": found}


def main(path: str, turns: str, *modules: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) as kind:
        kind.bind(("hash", "sha256"))  # brings what all of them need
    with open(path, "w") as file:
        for number in range(int(turns)):
            file.write(json.dumps(turn(modules[number % len(modules)])) + "\n")
            file.flush()
            os.fsync(file.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
