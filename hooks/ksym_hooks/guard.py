"""Keeps a host from harm by its plugins: what they raise, and what they return.

pluggy lets exceptions through and takes any answer. So each implementation is replaced by
one that answers None, "ask the next", where the plugin's own fails or makes no sense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pluggy import HookImpl

    from ksym_hooks.warning import Complaints

#: How long a plugin may keep a host waiting before a warning, in seconds.
SLOW = 1.0
#: What a plugin may raise; a Ctrl-C is the user's and goes on to the host.
RAISED = (Exception, SystemExit)
#: The attributes of a frame, and their types.
_FRAME = (
    ("address", int),
    ("name", str),
    ("offset", int),
    ("module", (str, type(None))),
    ("kind", str),
    ("certainty", str),
)


def protect(impl: HookImpl, hook: str, name: str, complaints: Complaints, is_trusted: bool) -> None:
    """From here on ``impl`` neither raises nor returns what its hook does not provide for.

    The answers of a trusted one are not checked: it warns itself of what takes long.
    """
    function, check = impl.function, None if is_trusted else _CHECKS.get(hook)
    at = impl.argnames.index("addresses") if "addresses" in impl.argnames else None

    def protected(*arguments: object) -> object:
        began = time.monotonic()
        try:
            answer = function(*arguments)
            if check is not None and answer is not None:
                check(answer, None if at is None else arguments[at])
        except _Nonsense as error:
            complaints.about(name, f"{hook} {error}; it is passed over")
            return None
        except RAISED as error:
            complaints.about(name, f"{hook} raised {describe(error)}; it is passed over")
            return None
        if not is_trusted and time.monotonic() - began > SLOW:
            complaints.about(name, f"{hook} took {time.monotonic() - began:.1f} s")
        return answer

    # pluggy's types call it final. The other places to catch a call are its private
    # _inner_hookexec, and a wrapper, which cannot have the next plugin asked instead.
    impl.function = protected  # type: ignore[misc]


def in_time(work: Callable[[], object], name: str, what: str, complaints: Complaints) -> object:
    """What ``work`` returns, or None where it raises or does not come back in time.

    One that is late goes on in a thread of its own, whose result nobody takes.
    """
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except RAISED as error:
            errors.append(error)

    worker = threading.Thread(target=run, name=f"ksym-{name}", daemon=True)
    worker.start()
    worker.join(SLOW)
    if worker.is_alive():
        complaints.about(name, f"{what} has taken {SLOW:g} s and is not done; it is passed over")
        return None
    if errors:
        complaints.about(name, f"{what} raised {describe(errors[0])}; it is passed over")
    return results[0] if results else None


class _Nonsense(Exception):
    """An answer that does not fit its hook."""


def describe(error: BaseException) -> str:
    """An error's class and text; the text is the plugin's own code, and may raise as well."""
    try:
        text = str(error)
    except RAISED:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_frames(answer: object, addresses: object) -> None:
    if not isinstance(answer, (list, tuple)):
        raise _Nonsense(f"returned a {type(answer).__name__} instead of a list")
    if not isinstance(addresses, Sequence):
        raise _Nonsense("does not look at the addresses")
    if len(answer) != len(addresses):
        raise _Nonsense(f"returned {len(answer)} answers for {len(addresses)} addresses")
    for address, item in zip(addresses, answer):
        # The same test as ``is_frame``, by which the host tells them apart.
        is_fine = _is_frame(item) if hasattr(item, "certainty") else _is_reason(item)
        if not is_fine:
            raise _Nonsense(f"returned a {type(item).__name__} that is neither frame nor reason")
        if getattr(item, "address", address) != address:
            raise _Nonsense(f"returned a frame of {item.address:#x} for {address:#x}")


def _is_frame(item: object) -> bool:
    return all(isinstance(getattr(item, name, item), kind) for name, kind in _FRAME)


def _is_reason(item: object) -> bool:
    return isinstance(getattr(item, "text", None), str)


def _check_name(answer: object, _: object) -> None:
    if not isinstance(answer, str):
        raise _Nonsense(f"returned a {type(answer).__name__} instead of a string")


def _check_sources(answer: object, _: object) -> None:
    if not isinstance(answer, dict) or not all(
        isinstance(name, str) and callable(construct) for name, construct in answer.items()
    ):
        raise _Nonsense("returned no dict of names and what to call")


_CHECKS: Mapping[str, Callable[[object, object], None]] = {
    "ksym_resolve_frames": _check_frames,
    "ksym_format_frame": _check_name,
    "ksym_sources": _check_sources,
}
