#!/usr/bin/env python3
"""What the kernel does on all CPUs, as folded stacks: a small host of ksym_hooks.

    ksym_sampler.py [--seconds N] [--hertz N] [--pid PID] > stacks.folded

Samples come from perf_event_open(2), with kernel callchains and CLOCK_MONOTONIC stamps;
every name comes through the hooks. Needs root, or CAP_PERFMON and CAP_SYSLOG. A stack is
printed as ``comm;outermost;...;innermost count``, a name that may be wrong with a question
mark; what was lost is said on stderr. docs/tutorial.md leads up to this.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections import Counter

from ksym_hooks import get_plugin_manager, hookimpl, is_frame
from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.perf_ring import Ring, online_text, parse_cpu_list
from ksym_plugin.timeline.errors import KsymError

# enum perf_event_sample_format, the software event cpu-clock, and a flag of the attr
TID, TIME, CALLCHAIN = 1 << 1, 1 << 2, 1 << 5
CPU_CLOCK = 0
EXCLUDE_CALLCHAIN_USER = 1 << 22
RECORD_LOST, RECORD_SAMPLE = 2, 9
#: PERF_CONTEXT_MAX: from here on entries of a callchain are markers.
MARKERS = 0xFFFF_FFFF_FFFF_F001
#: How often the rings are read, in seconds.
TURN = 0.1


class Sampler:
    """Rings of samples, one for each CPU; a context manager."""

    def __init__(self, hertz, pid):
        attr = syscalls.perf_event_attr(
            type=syscalls.TYPE_SOFTWARE,
            config=CPU_CLOCK,
            flags=syscalls.EXCLUDE_USER | EXCLUDE_CALLCHAIN_USER | syscalls.USE_CLOCKID,
            clockid=time.CLOCK_MONOTONIC,
            sample_type=TID | TIME | CALLCHAIN,
            sample_period=1_000_000_000 // hertz,
        )
        self.lost = 0
        self._rings = []
        try:
            for cpu in parse_cpu_list(online_text()):
                fd = syscalls.perf_event_open(attr, pid, cpu)
                self._rings.append(Ring(fd, cpu, False))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for ring in self._rings:
            ring.close()

    def take(self):
        """The samples there are: pid, time, addresses with the innermost first."""
        heads = [ring.head() for ring in self._rings]
        time.monotonic_ns()  # the read barrier that Ring.take asks for
        for ring, head in zip(self._rings, heads):
            if ring.waiting(head):
                yield from self._samples(ring.take(head)[0])

    def _samples(self, data):
        at = 0
        while at < len(data):
            kind, _, size = struct.unpack_from("=IHH", data, at)
            if kind == RECORD_SAMPLE:
                pid, _, stamp, depth = struct.unpack_from("=IIQQ", data, at + 8)
                chain = struct.unpack_from(f"={depth}Q", data, at + 32)
                yield pid, stamp, [address for address in chain if address < MARKERS]
            elif kind == RECORD_LOST:
                self.lost += struct.unpack_from("=QQ", data, at + 8)[1]
            at += size


class Gaps:
    """Listens for what the plugin has missed."""

    def __init__(self):
        self.count = 0

    @hookimpl
    def ksym_events_lost(self):
        self.count += 1


def comm_of(pid, known):
    """A process's name, as it was when it was first seen; spelled so that stacks stay lines."""
    if pid not in known:
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                text = file.read().strip()
        except OSError:
            text = "swapper" if pid == 0 else f"pid {pid}"
        known[pid] = "".join(c if c.isprintable() and c != ";" else "_" for c in text)
    return known[pid]


def stack_of(hook, addresses, stamp):
    """A sample's kernel frames, outermost first."""
    frames = hook.ksym_resolve_frames(addresses=addresses, time=stamp, clock="monotonic")
    names = [hook.ksym_format_frame(frame=f) if is_frame(f) else "[unknown]" for f in frames]
    return ";".join(reversed(names))


def sample(hook, sampler, seconds):
    stacks, comms = Counter(), {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(TURN)
        for pid, stamp, addresses in sampler.take():
            if addresses:
                stacks[f"{comm_of(pid, comms)};{stack_of(hook, addresses, stamp)}"] += 1
    return stacks


def main():
    parser = argparse.ArgumentParser(description="Kernel stacks on all CPUs, folded.")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--hertz", type=int, default=199)
    parser.add_argument("--pid", type=int, default=-1, help="this process alone")
    chosen = parser.parse_args()
    gaps = Gaps()
    with get_plugin_manager() as manager:
        manager.register(gaps, "sampler")
        # The first question starts the plugin: before the first sample, not after it.
        manager.hook.ksym_resolve_frames(addresses=[], time=None, clock="monotonic")
        try:
            with Sampler(chosen.hertz, chosen.pid) as sampler:
                stacks = sample(manager.hook, sampler, chosen.seconds)
        except (OSError, KsymError) as error:
            sys.exit(f"ksym_sampler: no samples ({error}); run as root or with CAP_PERFMON")
    for stack, count in stacks.most_common():
        print(stack, count)
    print(
        f"ksym_sampler: {sum(stacks.values())} samples, {sampler.lost} lost, "
        f"{gaps.count} windows in which changes were lost",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
