"""Pictures through matplotlib, if it is installed."""

from __future__ import annotations

import sys
from typing import Any

from mpbridge.errors import MpbridgeError

MISSING = "matplotlib is not installed (pip install 'mpbridge[plot]')"


def drawable() -> bool:
    """Whether pictures can be drawn; check before expensive work."""
    import importlib.util

    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # it is in sys.modules without a spec
        return False


def told_drawable() -> bool:
    """Like `drawable`, but reports on stderr if pictures cannot be drawn; the caller continues without."""
    there = drawable()
    if not there:
        print(f"no picture: {MISSING}", file=sys.stderr, flush=True)
    return there


def pyplot() -> Any:
    """matplotlib's pyplot without a display. Raises MpbridgeError with the extra's name where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MpbridgeError(f"no picture: {MISSING}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
