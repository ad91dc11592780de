"""Stands in for the Python module that comes with perf, which no distribution ships yet.

It has what that module has for reading a perf.data (tools/perf/python/perf.pyi and
tools/perf/util/python.c of Linux, September 2026), and behaves like it where scripts can
tell: ``callchain`` is None or a sequence without slices, leaf first; a frame without a name
or file has ``[unknown]`` for one, a sample without them has None; names that are not UTF-8
raise; threads are found by their number or TypeError is raised; attributes of an event
selector are few; an exception in a callback ends ``process_events``. A ``perf.data`` is
here a JSON file of samples, one a line, in the shape embedding perfs gave them.
"""

from __future__ import annotations

import json
import struct


class data:  # noqa: N801 - as perf spells them
    def __init__(self, path: str = "perf.data", fd: int = -1) -> None:
        self._path = path
        try:
            self._file = open(path, encoding="utf-8")  # noqa: SIM115
        except OSError:
            raise OSError(f"Failed to open perf data: {path}") from None

    def __str__(self) -> str:
        return self._path


class thread:  # noqa: N801
    def __init__(self, comm: str | None) -> None:
        self._comm = comm

    def comm(self) -> str | None:
        return self._comm


class evsel:  # noqa: N801
    def __init__(self, name: str, attr: bytes) -> None:
        self._name = name
        self.type, self.size, self.config, self.sample_period, self.sample_type = (
            struct.unpack_from("=IIQQQ", attr)
        )

    def __str__(self) -> str:
        return f"evsel({self._name})"


def _decoded(name: str | None, missing: str | None) -> str | None:
    """Names are given to Python as UTF-8, strictly."""
    return missing if name is None else name.encode("utf-8", "surrogateescape").decode("utf-8")


class callchain_node:  # noqa: N801
    def __init__(self, entry: dict) -> None:
        self.ip = entry["ip"]
        self._entry = entry

    @property
    def symbol(self) -> str | None:
        return _decoded(self._entry.get("sym", {}).get("name"), "[unknown]")

    @property
    def dso(self) -> str | None:
        return _decoded(self._entry.get("dso"), "[unknown]")


class callchain:  # noqa: N801
    def __init__(self, entries: list[dict]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, at: int) -> callchain_node:
        if not 0 <= at < len(self._entries):
            raise IndexError("Index out of range")
        return callchain_node(self._entries[at])


class sample_event:  # noqa: N801
    def __init__(self, event: dict) -> None:
        self._event = event
        sample = event["sample"]
        self.evsel = evsel(event["ev_name"], bytes.fromhex(event["attr"]))
        self.sample_pid, self.sample_tid = sample["pid"], sample["tid"]
        # A signed number here, -1 where samples carry no CPU.
        self.sample_cpu = struct.unpack("=i", struct.pack("=I", sample["cpu"]))[0]
        self.sample_ip, self.sample_time = sample["ip"], sample["time"]
        self.sample_period = sample["period"]
        entries = event.get("callchain")
        self.callchain = None if entries is None else callchain(entries)

    @property
    def symbol(self) -> str | None:
        return _decoded(self._event.get("symbol"), None)

    @property
    def dso(self) -> str | None:
        return _decoded(self._event.get("dso"), None)

    @property
    def sym_start(self) -> int | None:
        offset = self._event.get("symoff")
        return None if offset is None else self.sample_ip - offset

    @property
    def sym_end(self) -> int | None:
        offset = self._event.get("symoff")
        return None if offset is None else self.sample_ip + 1


class session:  # noqa: N801
    def __init__(self, data: data, sample: object = None, stat: object = None) -> None:
        if sample is not None and not callable(sample):
            raise TypeError("sample must be callable")
        self._data = data
        self._sample = sample
        self._comms: dict[int, str] = {}

    def process_events(self) -> None:
        for line in self._data._file:
            event = json.loads(line)
            if event.get("comm") is not None:
                self._comms[event["sample"]["tid"]] = event["comm"]
            self._sample(sample_event(event))  # type: ignore[operator]

    def find_thread(self, pid: int) -> thread:
        if pid not in self._comms:
            raise TypeError(f"Failed to find thread {pid}")
        return thread(self._comms[pid])
