"""One self-contained HTML page of a rehearsal: verdicts, tables and the pictures inside it; it loads nothing from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from mpbridge.rehearse.report import COLUMNS, NO_RANKING, Rehearsal, cells, overall

_OVERVIEW = ("recipe", "verdict", "last loss", "worst row error", "most flushed", "most saturated", "lowest SQNR dB", "seconds")  # fmt: skip


def page(rehearsal: Rehearsal, pictures: Iterable[Path]) -> str:
    """The HTML; pictures: PNG files, put under their recipe by their names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mpbridge.rehearse", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cells"] = cells
    return environment.get_template("page.html.j2").render(
        rehearsal=rehearsal,
        pictures={path.stem: base64.b64encode(path.read_bytes()).decode("ascii") for path in pictures},
        overview=_OVERVIEW,
        columns=COLUMNS,
        overall=overall,
        no_ranking=NO_RANKING,
    )
