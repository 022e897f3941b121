"""One self-contained HTML page of a rehearsal: verdicts, tables and the pictures inside it; it loads nothing from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mpbridge.rehearse.report import COLUMNS, NO_RANKING, Rehearsal, Rehearsed, cells, overall

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 0 auto; max-width: 1080px; padding: 24px; }
h1 { font-size: 1.5em; margin-bottom: .2em; }
h2 { font-size: 1.15em; margin-top: 2.2em; border-bottom: 1px solid #d5dae1; padding-bottom: .2em; }
table { border-collapse: collapse; font-size: .86em; margin: .8em 0; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: 3px 9px; border-bottom: 1px solid #e6e9ee; white-space: nowrap; } th { font-weight: 600; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.word { border-radius: 3px; padding: 1px 7px; font-weight: 600; }
.sound { background: #d9efdb; } .look { background: #fdf0c4; } .damage, .failed { background: #f6d3d0; } .high { background: #e4e8ee; }
.remark { background: #f3f5f8; padding: 8px 12px; border-left: 3px solid #8a98ab; } ul { margin: .4em 0; }
img { max-width: 100%; height: auto; display: block; margin: 10px 0; } .dim { color: #5d6a7a; font-size: .9em; }
details { margin: .6em 0; } summary { cursor: pointer; }
"""


def page(rehearsal: Rehearsal, pictures: Iterable[Path]) -> str:
    """The HTML; pictures: PNG files, put under their recipe by their names."""
    images = {path.stem: _image(path) for path in pictures}
    made = ", ".join(f"{name} {value}" for name, value in rehearsal.made.items())
    parts = [f"<h1>{escape(rehearsal.title)}</h1>", f'<p class="dim">{escape(made)}</p>', _overview(rehearsal)]
    parts += [f'<p class="remark">{escape(NO_RANKING)}</p>', images.get("losses", "")]
    parts += [_recipe(recipe, images) for recipe in rehearsal.recipes]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(rehearsal.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'


def _word(recipe: Rehearsed) -> str:
    word, _ = recipe.verdict()
    return f'<span class="word {word.split()[0]}">{escape(word)}</span>'


def _overview(rehearsal: Rehearsal) -> str:
    head = (
        "recipe",
        "verdict",
        "last loss",
        "worst row error",
        "most flushed",
        "most saturated",
        "lowest SQNR dB",
        "seconds",
    )
    rows = []
    for recipe in rehearsal.recipes:
        loss = f"{recipe.losses[-1]:.4f}" if recipe.losses else ""
        rows.append([escape(recipe.recipe), _word(recipe), loss, *overall(recipe), f"{recipe.seconds:.0f}"])
    return _table(head, rows)


def _recipe(recipe: Rehearsed, images: dict[str, str]) -> str:
    _, reasons = recipe.verdict()
    parts = [
        f"<h2>{escape(recipe.recipe)} {_word(recipe)}</h2>",
        "<ul>",
        *(f"<li>{escape(reason)}</li>" for reason in reasons),
        "</ul>",
    ]
    if recipe.quantized:
        parts += [f'<p class="dim">{recipe.quantized} linears quantized, {recipe.high} kept high</p>']
    if recipe.tensors:
        parts += ["<p>The worst tensors, by how much they lose beyond what their format costs anyway:</p>"]
        parts += [_table(COLUMNS, [list(map(escape, cells(row))) for row in recipe.worst])]
        parts += [images.get(f"{kind}_{recipe.recipe}", "") for kind in ("errors", "ranges", "amax")]
        every = _table(COLUMNS, [list(map(escape, cells(row))) for row in recipe.tensors])
        parts += [f"<details><summary>all {len(recipe.tensors)} operands</summary>{every}</details>"]
    if recipe.notes:
        parts += [
            '<p class="dim">What is not as on the GPU:</p>',
            '<ul class="dim">',
            *(f"<li>{escape(note)}</li>" for note in recipe.notes),
            "</ul>",
        ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'
