"""Stacks: folded text, repaired, drawn and accounted."""
