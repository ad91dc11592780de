"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPO.glob("*.md"), *REPO.glob("*/*.md"), *REPO.glob("bpf/*.c")])
#: A path of ours with a folder in front, as ``ksym_plugin/perf/text.py``; a wheel has ``_bpf``.
PATH = re.compile(
    r"(?<![\w./-])((?:ksym_plugin(?!/_)|hooks|bpf|contrib|tests|scripts|bench|docs)/[\w./-]*\w)"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_paths_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [path for path in PATH.findall(text) if not (REPO / path).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert missing == []


def test_there_are_documents_with_paths() -> None:
    assert {"README.md", "CONTRIBUTING.md"} <= {path.name for path in DOCUMENTS}
    assert PATH.findall("see `ksym_plugin/perf/text.py`.") == ["ksym_plugin/perf/text.py"]
