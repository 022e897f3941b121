"""The README's picture: what `mpbridge check` prints, as docs/check.svg. `python scripts/generate/picture.py` writes it."""

from __future__ import annotations

import contextlib
import html
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from mpbridge.cli.main import main

OUT = ROOT / "docs" / "check.svg"
COMMAND = "check --config llama3_70b --recipe fp8_cs --target h100 data.corpus=stdlib"
COLUMNS, LINE, CHAR = 140, 18, 7.83
COLORS = {"verdict  no": "#ff7b72", "verdict  yes": "#7ee787", "fits   no": "#ff7b72", "valid  yes": "#7ee787", "instead": "#79c0ff", "not said": "#79c0ff"}  # fmt: skip
"""How a line begins -> its color."""


def drawn() -> str:
    """The picture as SVG: text in a terminal's window, without anything loaded from elsewhere."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        with contextlib.redirect_stdout(out):
            main(COMMAND.split())
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({} if before is None else {"COLUMNS": before})
    lines = [f"$ mpbridge {COMMAND}", *out.getvalue().rstrip().splitlines()]
    width, height = round(COLUMNS * CHAR) + 32, len(lines) * LINE + 28
    rows = [
        f'<text x="16" y="{24 + LINE * row}" fill="{next((color for start, color in COLORS.items() if line.startswith(start)), "#e6edf3")}" xml:space="preserve">{html.escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="The output of mpbridge check">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13">',
            *rows,
            "</g>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    OUT.write_text(drawn(), encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
