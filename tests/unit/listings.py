"""The tutorial's listings, as they are printed."""

from __future__ import annotations

import os
import re

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LISTING = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def listings():
    """Text by file name."""
    with open(os.path.join(REPO, "docs", "tutorial.md"), encoding="utf-8") as file:
        return dict(_LISTING.findall(file.read()))
