"""Events as perf hands them to a script, with every key that perf 6.1 gives them."""

from __future__ import annotations

import struct
from typing import Any

SECOND = 1_000_000_000
#: Of perf_event_attr: PERF_SAMPLE_IP, _TID, _TIME, _CALLCHAIN, _CPU and _PERIOD.
IP, TID, TIME, CALLCHAIN, CPU, PERIOD = 1, 2, 4, 1 << 5, 1 << 7, 1 << 8
SAMPLED = IP | TID | TIME | CALLCHAIN | PERIOD
USE_CLOCKID = 1 << 25
KERNEL, USER, GUEST_KERNEL, GUEST_USER = 1, 2, 4, 5
CORE = 0xFFFF_FFFF_8100_0400
VMLINUX = "[kernel.kallsyms]"


def attr(kind: int = 1, sample_type: int = SAMPLED, clockid: int | None = None) -> bytes:
    """A raw perf_event_attr of 128 bytes."""
    raw = bytearray(128)
    struct.pack_into("=IIQQQ", raw, 0, kind, len(raw), 0, 4000, sample_type)
    if clockid is not None:
        struct.pack_into("=Q", raw, 40, USE_CLOCKID)
        struct.pack_into("=i", raw, 92, clockid)
    return bytes(raw)


def node(
    address: int, name: str | None = None, offset: int = 4, dso: str | None = None, base: int = 0
) -> dict[str, Any]:
    """An entry of a callchain; its symbol's addresses are ``base`` lower than the frame's."""
    entry: dict[str, Any] = {"ip": address}
    if name is not None:
        start = address - base - offset
        entry["sym"] = {"start": start, "end": start + 64, "binding": 1, "name": name}
        entry["sym_off"] = offset
    if dso is not None:
        entry["dso"] = dso
    return entry


def bpf(address: int, name: str, offset: int = 4) -> dict[str, Any]:
    """A frame that perf took for a BPF program: its own name is its dso."""
    return node(address, name, offset, name, base=address - offset)


def event(*chain: dict[str, Any], time: int = SECOND, **changed: Any) -> dict[str, Any]:
    """A sample; ``changed`` replaces keys of the event, or of ``sample`` where they are there."""
    sample: dict[str, Any] = {
        "addr": 0,
        "cpu": 0xFFFF_FFFF,
        "cpumode": KERNEL,
        "datasrc": 84410401,
        "datasrc_decode": "|OP N/A|LVL N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A",
        "ip": CORE,
        "period": 250000,
        "phys_addr": 0,
        "pid": 7,
        "tid": 8,
        "time": time,
        "transaction": 0,
        "values": [(0, 0, 0)],
        "weight": 0,
    }
    whole: dict[str, Any] = {
        "attr": attr(),
        "brstack": [],
        "brstacksym": [],
        "callchain": list(chain),
        "comm": "demo",
        "ev_name": "cpu-clock",
        "iregs": "",
        "raw_buf": b"",
        "uregs": "",
    }
    if chain:
        sample["ip"] = chain[0]["ip"]
    for key, value in changed.items():
        (sample if key in sample else whole)[key] = value
    return {**whole, "sample": sample}
