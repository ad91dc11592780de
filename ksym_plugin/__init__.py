"""Kernel frames, BPF above all, named as they were at the instant they were sampled.

Sources of changes are made of the names below: ``Load``, ``Unload`` and ``Loss`` are what
they deliver, of a ``Symbol`` each, and ``SourceError`` is what they raise. Hosts get
``Frame`` and ``Reason`` through ``ksym_hooks``.

Importing this package imports nothing else; each name is loaded when it is asked for. What
perf's embedded interpreter loads needs only the standard library, because that has nothing more.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.timeline.errors import KsymError, SourceError
    from ksym_plugin.timeline.symbols import Frame, Load, Loss, Reason, Symbol, Unload

__version__ = "0.1.0"
__all__ = ["Frame", "KsymError", "Load", "Loss", "Reason", "SourceError", "Symbol", "Unload"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ksym_plugin.timeline import errors, symbols

    value = getattr(errors if name.endswith("Error") else symbols, name)
    globals()[name] = value
    return value
