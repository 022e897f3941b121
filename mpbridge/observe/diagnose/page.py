"""Pages of a run: what low precision does to its tensors, and what went wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from mpbridge.common.pages.about import OPERAND_COLUMNS, data_text, glossary, made_now, model_text
from mpbridge.common.pages.document import Page
from mpbridge.common.report.curves import CURVES
from mpbridge.common.tables import Column
from mpbridge.observe.diagnose.diagnosis import Diagnosis
from mpbridge.observe.diagnose.evidence import Evidence
from mpbridge.observe.diagnose.signals import LABELS

CHARTS = (
    ("linears", "linear", "x_amax", "amax of each linear's input", "amax", True),
    ("linears", "linear", "x_outlier", "outlier channel of each linear's input", "largest over median channel", True),
    ("linears", "linear", "dy_amax", "amax of each linear's output gradient", "amax", True),
    ("linears", "linear", "grad_to_noise", "gradient to noise of each weight", "|g| over |noise|", True),
    ("weights", "parameter", "rms", "RMS of each parameter", "RMS", True),
)  # fmt: skip
"""Table, key, number, title, axis, logarithmic."""
MANY = 8
"""Number of layers from which on a heat map is shown above a chart of tensors, to find the curves of interest among more than are drawn at once."""
COLUMNS = [
    OPERAND_COLUMNS["layer"],
    Column(name="linear", number=False),
    Column(name="operand", number=False, help="x: activations, w: weights, dy: gradients, and which copy"),
    *(OPERAND_COLUMNS[name] for name in ("GEMMs", "format", "flushed", "saturated", "row error", "SQNR, dB")),
    Column(name="amax", help="largest absolute value"),
    Column(name="scale", help="multiplier before the cast; with blocks, the median one"),
    OPERAND_COLUMNS["staleness, log2"],
    Column(name="not finite", help="infinities and NaN"),
]
TERMS = (
    "amax", "copy", "dgrad, fprop, wgrad", "flushed", "gradient to noise", "operand", "outlier", "row error", "saturated", "scale", "SQNR", "staleness",
)  # fmt: skip


def precision_page(run: Evidence) -> Page:
    """Statistics of a run in training: heat map, curves by layer, the operands of the latest measurement."""
    page = Page(f"Low precision of {run.curves.name}", _made(run), glossary(*TERMS))
    _gaps(page, run)
    if run.measured and not any(one.tables["operands"] for one in run.measured):
        page.text("No GEMM of this run is quantized; its curves, linears and weights follow.")
    _operand_tables(page, run)
    _curves(page, run, marks=[])
    _tensor_charts(page, run, marks=[], first=[])
    return page


def diagnosis_page(found: Diagnosis) -> Page:
    """The verdict with links to its plots, what changed before it, the curves with marks, tensors, and differences from the other run."""
    run = found.run
    page = Page(f"Diagnosis of {run.curves.name}", _made(run), glossary(*TERMS, "main weight"))
    place = len(page.blocks)
    marks: list[tuple[float, str]]
    marks = [(one.step, f"{_MARKS.get(one.number, one.number)}: step {one.step}") for one in found.onsets]
    causes: list[tuple[float, str]] = [(one.step, f"{one.cause}: step {one.step}") for one in found.suspects[:1]]
    page.heading("Curves")
    charts = _curves(page, run, marks=[*marks, *(one for one in causes if one[0] not in {step for step, _ in marks})])
    if run.measured:
        page.heading("Tensors")
    named = [name for suspect in found.suspects for name in suspect.tensors]
    charts |= _tensor_charts(page, run, marks=[*marks[:1], *causes], first=[*named, *(odd.tensor for odd in found.odd)])
    odd = page.table(
        "Tensors out of line, earliest first",
        [
            Column(name="layer", number=False, layer=True),
            Column(name="step"),
            Column(name="tensor", number=False),
            Column(name="number", number=False),
            Column(name="before", help="median of the earlier measurements"),
            Column(name="after"),
            Column(name="factor", help="after over before"),
        ],
        [[layer_of(one.tensor), one.step, one.tensor, LABELS.get(one.number, one.number), one.before, one.after, one.factor] for one in found.odd],
    ) if found.odd else ""  # fmt: skip
    _operand_tables(page, run)
    body, page.blocks[place:] = page.blocks[place:], []
    _verdict(page, found, charts, odd)
    page.blocks += body
    return page


def layer_of(name: str) -> str:
    """The layer's number in a tensor's name; '' outside of the layers."""
    return next((part for part in name.split(" ")[0].split(".") if part.isdigit()), "")


def kind_of(name: str) -> str:
    """The rest of a tensor's name after the layer's number."""
    return name.partition(f".{layer_of(name)}.")[2] or name


def _made(run: Evidence) -> dict[str, str]:
    known = run.precision.get("versions")
    versions = {name: value for name, value in known.items() if value} if isinstance(known, dict) else {}
    return made_now(
        recipe=run.recipe,
        realization=run.measured[-1].facts.get("realization") if run.measured else None,
        engine=run.precision.get("engine"),
        model=model_text(run.config),
        data=data_text(run.config),
        steps=f"{len(run.curves.rows)}, {len(run.measured)} of them measured",
        run=run.folder,
        versions=", ".join(f"{name.replace('_', '-')} {value}" for name, value in versions.items()),
    )


def _verdict(page: Page, found: Diagnosis, charts: dict[str, str], odd: str) -> None:
    # a jump that nothing in the files explains is not blamed on anything
    word, tone = ("out of line", "bad" if found.suspects else "warn") if not found.healthy else ("no verdict", "warn") if found.run.short else ("healthy", "good")  # fmt: skip
    page.verdicts("", [{"word": word, "tone": tone, "text": found.verdict}])
    links = {"loss": charts.get("loss"), "grad_norm": charts.get("grad_norm"), "applied": charts.get("loss")}
    if found.onsets:
        steps = [{"text": f"step {one.step}: {one.what}", "href": links.get(one.number)} for one in found.onsets]
        page.verdicts("First steps out of line", steps)
    if found.suspects:
        page.heading("Causes that fit, most likely first")
        causes = [
            {
                "word": one.cause, "tone": "bad" if number == 0 else "warn", "text": f"{one.sentence} (step {one.step}, evidence {one.score:.2f})",
                "href": charts.get(_PLOTS.get(one.cause, "loss")) or odd or charts.get("loss"),
                "more": [*(f"seen: {line}" for line in one.evidence), *(f"try: {line}" for line in one.advice)],
            }
            for number, one in enumerate(found.suspects)
        ]  # fmt: skip
        page.verdicts("", causes)
    changed = "What changed" if found.healthy else "What changed before"
    for title, lines in ((changed, found.changes), ("Compared with the other run", found.against)):
        if lines:
            page.verdicts(title, [{"text": line} for line in lines])
    _gaps(page, found.run)


_PLOTS = {
    "outlier-channel": "x_outlier", "weight-corrupted": "rms", "moments-lost": "rms", "rate-too-high": "rms", "nan-source": "x_amax",
    "wrong-scale": "operands", "frozen-scale": "operands", "recipe-switch": "operands", "loss-scale": "loss_scale", "no-update": "grad_norm",
}  # fmt: skip
"""Cause -> the number whose chart shows it; the loss otherwise."""
_MARKS = {"grad_norm": "gradient norm", "applied": "not finite"}
"""Number of an onset -> its label at a mark, if that differs."""


def _gaps(page: Page, run: Evidence) -> None:
    if run.gaps:
        page.verdicts("What cannot be determined", [{"text": line} for line in run.gaps])
    if run.remaining:
        page.verdicts("What can still be determined", [{"text": line} for line in run.remaining])


def _curves(page: Page, run: Evidence, *, marks: list[tuple[float, str]]) -> dict[str, str]:
    found = {}
    for number, (label, log) in CURVES.items():
        # a step without a finite value breaks the line
        known = ((row["iteration"], row[number]) for row in run.curves.rows if number in row)
        points = [(step, value if _finite(value) else math.nan) for step, value in known]
        if not run.curves.series(number) or (number == "loss_scale" and {value for _, value in points} == {1.0}):
            continue
        series: list[tuple[str, Any, str]] = [(number.replace("_", " "), points, "")]
        if number == "loss" and run.curves.evaluations:
            series.append(("held out", [(row["iteration"], row["eval_loss"]) for row in run.curves.evaluations], ""))
        found[number] = page.chart(
            label.partition(",")[0], series, y=label, log=log, marks=marks, reach=_reach_of(run), note=_not_drawn(run, number)
        )  # fmt: skip
    return found


def _reach_of(run: Evidence) -> tuple[float, float] | None:
    """First and last step: every chart of the run has the same axis, regardless of what was measured last."""
    rows = run.curves.rows
    return (rows[0]["iteration"], rows[-1]["iteration"]) if rows else None


def _not_drawn(run: Evidence, number: str) -> str:
    """A sentence on the steps without a finite value; '' if there are none."""
    missing = [row["iteration"] for row in run.curves.rows if number in row and not _finite(row[number])]
    if not missing:
        return ""
    several = f"{len(missing)} steps, the first of them {missing[0]}, are"
    where = f"step {missing[0]} is" if len(missing) == 1 else several
    return f"Not drawn: {where} without a finite value."


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _tensor_charts(page: Page, run: Evidence, *, marks: list[tuple[float, str]], first: list[str]) -> dict[str, str]:
    """first: tensors whose curves come before the others, and which are kept if not all can be shown."""
    found = {}
    for table, key, number, title, label, log in CHARTS:
        known = ((name, run.series(table, name, number, key=key)) for name in run.names(table, key))
        series = [(name, points, layer_of(name)) for name, points in known if points]
        series.sort(key=lambda one: (not any(one[0] in name for name in first), -_reach(one[1])))
        if series:
            _movement(page, title, series)
            found[number] = page.chart(title, series, y=label, log=log, marks=marks, reach=_reach_of(run), order="tensors named in the verdict and those that move most first" if first else "tensors that move most first")  # fmt: skip
    stale = [
        (name, [(step, row["staleness"]) for step, row in points if isinstance(row["staleness"], (int, float))], layer_of(name))
        for name, points in run.operands().items()
    ]  # fmt: skip
    stale = [one for one in stale if one[1]]
    if stale:
        stale.sort(key=lambda one: -max(abs(value) for _, value in one[1]))
        found["operands"] = page.chart("staleness of each delayed scale", stale, y="log2 (scale for the amax / scale used)", marks=marks, reach=_reach_of(run), order="stalest first")  # fmt: skip
    return found


def _movement(page: Page, title: str, series: list[tuple[str, list[tuple[int, float]], str]]) -> None:
    """For a deep model: how far each curve moves, by layer and kind."""
    layers = sorted({layer for _, _, layer in series if layer}, key=int)
    if len(layers) < MANY:
        return
    values = {(layer, kind_of(name)): 2.0 ** _reach(points) for name, points, layer in series if layer}
    kinds = _in_order(kind for _, kind in sorted(values, key=lambda place: int(place[0])))
    high = max(10.0, *values.values())
    page.heat(f"{title}: how far it moves", layers, kinds, values, low=1.0, high=high, unit="times", note="Largest over smallest value of the run.")  # fmt: skip


def _in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order of the model, the experts of a linear by number."""
    found = list(dict.fromkeys(kinds))
    places = {name: i for i, name in reversed([*enumerate(map(_numberless, found))])}
    return sorted(found, key=lambda kind: (places[_numberless(kind)], [int(n) for n in re.findall(r"\.(\d+)\.", kind)]))


def _numberless(kind: str) -> str:
    return re.sub(r"\.\d+\.", ".", kind)


def _reach(points: list[tuple[int, float]]) -> float:
    """How far a curve moves, in powers of two."""
    good = [value for _, value in points if math.isfinite(value) and value > 0]
    return math.log2(max(good) / min(good)) if good else 0.0


def _operand_tables(page: Page, run: Evidence) -> None:
    measured = [one for one in run.measured if one.tables["operands"]]
    if not measured:
        return
    last = measured[-1]
    rows = last.tables["operands"]
    shown = [
        [layer_of(row["linear"]), row["linear"], f"{row['side']} {row['copy']}", row["gemms"].replace("+", " "), row["format"], *(row[name] for name in ("flushed", "saturated", "row_error", "sqnr", "amax", "scale", "staleness", "nonfinite"))]
        for row in rows
    ]  # fmt: skip
    order = sorted(range(len(rows)), key=lambda i: -(rows[i]["row_error"] or 0.0))
    values: dict[tuple[str, str], float] = {}
    for row in rows:
        layer = layer_of(row["linear"])
        if row["row_error"] is not None:
            values[layer, f"{kind_of(row['linear'])} {row['side']} {row['copy']}"] = row["row_error"]
    layers = sorted({layer for layer, _ in values}, key=lambda text: int(text or -1))
    if values:
        page.heat(f"Median row error by layer, step {last.step}", layers, _in_order(kind for _, kind in values), values, low=0.01, high=1.0)  # fmt: skip
    page.table(f"Operands of step {last.step}", COLUMNS, shown, order=order)
