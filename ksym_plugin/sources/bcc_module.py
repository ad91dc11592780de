"""Finds iovisor's bcc, also from an environment that does not have it.

The bindings are pure Python over ctypes and come with the distribution, so any Python can
use those of the system's. PyPI's ``bcc`` is an unrelated project of the same name.
"""

from __future__ import annotations

import glob
import os
import sys

from ksym_plugin.timeline.errors import SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Final

#: Where distributions keep Python packages: Debian and its kin, then all others.
_SYSTEM: Final = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/lib64/python3*/site-packages",
)
#: What iovisor's has, and no other.
_MARK: Final = "libbcc.py"
#: The system's is imported under a name of its own: ``bcc`` may be somebody else's here.
_PRIVATE_NAME: Final = "ksym_plugin._system_bcc"
_INSTALL: Final = (
    "install iovisor's bindings (Debian and Ubuntu: apt install python3-bpfcc; "
    "Fedora: dnf install python3-bcc; Arch: pacman -S python-bcc)"
)


def load() -> ModuleType:
    """iovisor's bcc, imported. SourceError where it is not installed or does not work."""
    folder, other = _here()
    name = "bcc"
    if not folder:
        folder, name = _in_system(), _PRIVATE_NAME
    if not folder:
        raise _missing(other)
    try:
        return sys.modules.get(name) or _import(name, folder)
    except (ImportError, OSError) as error:
        # OSError is the dynamic loader's.
        raise SourceError(
            f"bcc in {folder} cannot be imported ({error})", "reinstall python3-bpfcc and libbpfcc"
        ) from error


def _here() -> tuple[str, str]:
    """Where this Python's own bcc is if it is iovisor's; and if not, where that other one is."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("bcc", sys.path)
    if spec is None:
        return "", ""
    for folder in spec.submodule_search_locations or ():
        if os.path.exists(os.path.join(folder, _MARK)):
            return folder, ""
    return "", os.path.dirname(spec.origin or "") or "this environment"


def _in_system() -> str:
    for pattern in _SYSTEM:
        for mark in sorted(glob.glob(os.path.join(pattern, "bcc", _MARK)), reverse=True):
            return os.path.dirname(mark)
    return ""


def _missing(other: str) -> SourceError:
    if not other:
        return SourceError("bcc is not installed", _INSTALL)
    return SourceError(
        f"the bcc in {other} is PyPI's, which has nothing to do with BPF",
        f"{_INSTALL}; the other one may stay, or go by: {sys.executable} -m pip uninstall bcc",
    )


def _import(name: str, folder: str) -> ModuleType:
    import warnings
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(folder, "__init__.py")
    spec = spec_from_file_location(name, file, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {file}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    # Written for another Python: this one may warn of its strings, and must not leave its
    # compiled files among the distribution's.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    except BaseException:
        for known in [known for known in sys.modules if f"{known}.".startswith(f"{name}.")]:
            del sys.modules[known]
        raise
    finally:
        sys.dont_write_bytecode = writes_none
    return module
