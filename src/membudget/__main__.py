"""Run the command-line interface: `python -m membudget`."""

from __future__ import annotations

import sys

from membudget.cli import main

sys.exit(main())
