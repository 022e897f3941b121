"""A picture of stacked bars: where time goes, what memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpbridge.errors import BadValue, MpbridgeError


def stacked_bars(path: Path, bars: Mapping[str, Mapping[str, float]], *, unit: str, title: str) -> None:
    """Writes one horizontal bar for each name of `bars`, its parts one after another. Raises MpbridgeError where matplotlib is missing, BadValue
    where the file cannot be written."""
    try:
        import matplotlib
    except ImportError as error:
        raise MpbridgeError(
            "a picture needs matplotlib, which is not installed (pip install 'mpbridge[plot]')"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.7 * len(bars)))
    colours = plt.get_cmap("tab20")
    for index, part in enumerate(parts):
        left = [sum(bar.get(earlier, 0.0) for earlier in parts[:index]) for bar in bars.values()]
        width = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(list(bars), width, left=left, label=part, color=colours(index % 20))
    axes.set(xlabel=unit, title=title)
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise BadValue(f"picture {path} cannot be written: {error}") from None
    finally:
        plt.close(figure)
