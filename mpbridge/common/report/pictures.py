"""Pictures through matplotlib, if it is installed: its check and import, and stacked bars of breakdowns of time and memory."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common import files
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.shipped import install

MISSING = f"matplotlib is not installed ({install('plot')})"


def drawable() -> bool:
    """Whether pictures can be drawn, which is said on stderr if not: the caller checks before expensive work, and continues without."""
    import importlib.util

    try:
        there = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # it is in sys.modules without a spec
        there = False
    if not there:
        from mpbridge.common.report.console import warn

        warn(f"no picture: {MISSING}")
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


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of bars: name -> parts in order."""

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]


def stacked_bars(path: Path, panels: Sequence[Panel]) -> None:
    """Writes a picture of the panels, one above the other, with a horizontal stacked bar for each name. Raises MpbridgeError
    if matplotlib is missing, BadValue if the file cannot be written."""
    plt = pyplot()
    height = sum(2.2 + 0.6 * len(panel.bars) for panel in panels)
    figure = plt.figure(figsize=(10, height), layout="constrained")
    for panel, part in zip(panels, figure.subfigures(len(panels), 1, squeeze=False)[:, 0], strict=True):
        _draw(part.subplots(), panel, plt.get_cmap("tab20"))
        # the layout makes room for a part's legend, and none for one that hangs below its axes
        part.legend(fontsize=7, ncol=4, loc="outside lower center")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Writes a figure in the format of the name's ending (PNG without one) and closes it. Raises BadValue if it cannot be written."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=path.suffix.lstrip(".") or "png")
        files.write(path, drawn.getvalue())
    except (OSError, ValueError) as error:
        raise BadValue(f"picture {path} cannot be written: {files.why(error)}") from None
    finally:
        pyplot().close(figure)


def _draw(axes: Any, panel: Panel, colours: Any) -> None:
    parts = list(dict.fromkeys(part for bar in panel.bars.values() for part in bar))
    for index, part in enumerate(parts):
        left = [sum(bar.get(earlier, 0.0) for earlier in parts[:index]) for bar in panel.bars.values()]
        width = [bar.get(part, 0.0) for bar in panel.bars.values()]
        axes.barh(list(panel.bars), width, left=left, label=part, color=colours(index % 20))
    axes.set(xlabel=panel.unit, title=panel.title)
    axes.invert_yaxis()
