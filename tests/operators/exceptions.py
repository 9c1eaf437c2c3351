"""What is left out of the operator tables, each with its proof or torch's own issue."""

from __future__ import annotations

PLAIN_CRASHES: dict[tuple[str, str], str] = {
    ("nn.functional.pdist", "empty"): "backward of no rows reads past its memory",
}
"""Variants that crash the process without a region, by operator and layout."""

UNREPEATABLE: dict[str, str] = {}
"""Operators of which two plain runs in one process differ, with the reason."""
