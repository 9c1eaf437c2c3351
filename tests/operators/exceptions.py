"""What is left out of the operator tables, each with torch's own issue or its proof."""

from __future__ import annotations

PLAIN_CRASHES: dict[tuple[str, str], str] = {
    # The backward of no rows divides by zero.
    (
        "nn.functional.pdist",
        "empty",
    ): "https://github.com/pytorch/pytorch/issues/197099",
}
"""Variants that kill the process without a region, by operator and layout."""

UNREPEATABLE: dict[str, str] = {}
"""Operators of which two plain steps in one process differ, and why."""
