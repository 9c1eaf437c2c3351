"""Build the emulated device, before tests that need it: `python -m tests.emulated`.

Exit code 3 means that it cannot be built here, because there is no compiler.
"""

from __future__ import annotations

import sys

from membudget.engine.native.library import NoExtensionError
from tests.emulated.library import DEVICE

NO_COMPILER = 3


def main() -> int:
    """Build the device and say why not, if it cannot be."""
    if why_not := DEVICE.why_not():
        print(f"The emulated device cannot be built: {why_not}.")  # noqa: T201
        return NO_COMPILER
    try:
        print(f"The emulated device is {DEVICE.build(again=DEVICE.find() is None)}")  # noqa: T201
    except NoExtensionError as error:
        print(f"The emulated device: {error}")  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
