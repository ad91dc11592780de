"""The handler's account of BPF programs, printed as one JSON document."""

from __future__ import annotations

from ksym_plugin.perf.naming import is_bpf_name
from ksym_plugin.stacks.report import ELSEWHERE, KERNEL, Account
from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

    from ksym_plugin.timeline.location import Place


class ReportOutput:
    """Samples by BPF program; see ``Account.documents``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._account = Account()

    def user(self, _node: dict[str, Any]) -> str:
        return ELSEWHERE

    def kernel(
        self,
        _address: int,
        name: str,
        _offset: int | None,
        dso: str,
        place: Place | None = None,
    ) -> str:
        if dso == BPF_MODULE or (name and is_bpf_name(name, dso)):
            # Code without a name, as classic BPF is, goes by what it is known to be.
            return self._account.frame(name or BPF_MODULE, place)
        # What a virtual machine was at is not this kernel's time.
        return ELSEWHERE if dso.startswith("[guest") else KERNEL

    def sample(self, event: dict[str, Any], pieces: list[str]) -> None:
        comm = event.get("comm")
        self._account.add(str(event.get("ev_name")), ":-1" if comm is None else str(comm), pieces)

    def close(self) -> None:
        import json

        json.dump(self._account.documents(), self._stream)
        self._stream.write("\n")
        self._stream.flush()
