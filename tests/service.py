"""What ``contrib/systemd/ksym-record.service`` says."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "contrib" / "systemd" / "ksym-record.service"


def settings() -> dict[str, str]:
    """Its settings, the last of each name."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def capabilities() -> list[str]:
    """What the service may do beyond being root, as capsh and setpriv spell it."""
    return [name[len("CAP_") :].lower() for name in settings()["CapabilityBoundingSet"].split()]
