#!/usr/bin/env python3
"""What the kernel does on all CPUs, as folded stacks: a small host of ksym_hooks.

    ksym_sampler.py [--seconds N] [--hertz N] [--pid PID] > stacks.folded

Samples come from perf_event_open(2), with kernel callchains and CLOCK_MONOTONIC stamps;
every name comes through the hooks. Needs root, or CAP_PERFMON and CAP_SYSLOG. A stack is
printed as ``comm;outermost;...;innermost count``, a name that may be wrong with a question
mark; what was lost is said on stderr. perf_samples.py, beside this file, takes the samples.
docs/tutorial.md leads up to this.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from perf_samples import Sampler

from ksym_hooks import get_plugin_manager, hookimpl, is_frame

#: How often the rings are read, in seconds.
TURN = 0.1


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
        except OSError as error:
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
