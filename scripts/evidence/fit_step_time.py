"""Fits the constants of `mpbridge estimate` to published runs and prints the errors of the predictions, with each layout, model, machine and release left out of the fit in turn.

    python scripts/evidence/fit_step_time.py            # the table of figures, with the shipped data file's priors
    python scripts/evidence/fit_step_time.py --write    # also writes the constants to mpbridge/planning/estimate/data/step_time.json

Errors are relative errors of tokens/s/GPU: predicted / published - 1.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
from published import CORES, FITTED, UNUSUAL, run_of, timed

from mpbridge.planning.estimate.constants import DATA, Constants, constants
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.planning.estimate.predict import Ideal, _band, ideal, seconds

SPREAD = 0.05
"""Relative error above which a row counts linearly instead of quadratically."""


LAYOUT = ("gpus", "global_batch", "micro_batch", "tensor", "pipeline", "virtual", "expert", "context")


class Row:
    """A published run with its ideal times."""

    def __init__(self, row: dict) -> None:
        run = run_of(row)
        self.row = row
        self.run = run.facts
        self.made: Ideal = ideal(run.policy, run.facts, run.facts.machine)
        self.published = 1 / row["tokens"]
        self.flops = model_flops_per_token(run.facts.shape, run.facts.model)
        where = run.facts.machine
        self.peak = where.flops(run.policy.narrowest) or where.flops("bf16") or 0.0
        self.group = (row["model"], row["machine"])

    def predicted(self, using: Constants) -> float:
        """Seconds per token per GPU."""
        return sum(seconds(self.made, using).values()) / self.made.tokens


class Fit:
    """Robust least squares of the logarithms, with priors (Gauss-Newton with damping)."""

    def __init__(self, base: Constants, data: dict) -> None:
        self.base = base
        self.shared = [name for name, entry in data["shared"].items() if entry["free"]]
        self.machines = list(data["machines"])
        entries = [data["shared"][name] for name in self.shared] + [data["machines"][name] for name in self.machines]
        self.mean = np.log([entry["prior"] for entry in entries])
        self.sd = np.array([entry["sd"] for entry in entries])
        self.last: np.ndarray | None = None
        """Where the first fit ended: later ones, to fewer rows, start there."""

    def constants(self, theta: np.ndarray) -> Constants:
        values = np.exp(theta)
        shared = dict(self.base.shared) | {n: float(v) for n, v in zip(self.shared, values, strict=False)}
        machines = {n: float(v) for n, v in zip(self.machines, values[len(self.shared) :], strict=True)}
        return replace(self.base, shared=shared, machines=machines)

    def run(self, rows: list[Row]) -> Constants:
        # a layout in several releases counts less than as many different layouts
        same: dict[tuple, int] = defaultdict(int)
        for row in rows:
            same[(*row.group, row.row["precision"])] += 1
        weight = np.array([same[(*row.group, row.row["precision"])] ** -0.5 for row in rows])
        published = np.log([row.published for row in rows])

        def residuals(theta: np.ndarray) -> np.ndarray:
            using = self.constants(theta)
            off = np.log([row.predicted(using) for row in rows]) - published
            soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + (off / SPREAD) ** 2) - 1))
            return np.concatenate([weight * soft, (theta - self.mean) / self.sd])

        theta, damping = (self.mean if self.last is None else self.last).copy(), 1e-2
        best = residuals(theta)
        for _ in range(60):
            slope = np.stack([(residuals(theta + 1e-4 * unit) - best) / 1e-4 for unit in np.eye(len(theta))], axis=1)
            normal = slope.T @ slope
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ best)
            there = residuals(theta + step)
            if there @ there < best @ best:
                gain = best @ best - there @ there
                theta, best, damping = theta + step, there, damping / 3
                if gain < 1e-6:
                    break
            else:
                damping *= 5
                if damping > 1e6:
                    break
        self.last = theta if self.last is None else self.last
        return self.constants(theta)


def errors(rows: list[Row], using: Constants) -> dict[int, float]:
    """Row -> relative error of tokens/s/GPU."""
    return {row.row["id"]: row.published / row.predicted(using) - 1 for row in rows}


def summary(found: dict[int, float]) -> str:
    size = np.abs(list(found.values()))
    return f"{len(size):4d} rows   median {np.median(size):6.1%}   p90 {np.quantile(size, 0.9):6.1%}   worst {size.max():6.1%}"


def left_out(fit: Fit, rows: list[Row], groups: tuple[str, ...]) -> dict[int, float]:
    """Errors of each group of rows, equal in `groups`, with constants fitted to the others; a machine that is left out has no constant of its own."""
    found: dict[int, float] = {}
    key = {row.row["id"]: tuple(row.row[name] for name in groups) for row in rows}
    for group in sorted(set(key.values()), key=str):
        mine = [row for row in rows if key[row.row["id"]] == group]
        using = fit.run([row for row in rows if key[row.row["id"]] != group])
        known = {name: v for name, v in using.machines.items() if groups != ("machine",) or name != group[0]}
        found |= errors(mine, replace(using, machines=known))
    return found


def biases(rows: list[Row], error: dict[int, float], group: str) -> list[float]:
    """The size of the median signed error of each group."""
    return [
        abs(float(np.median([error[row.row["id"]] for row in rows if row.row[group] == name])))
        for name in sorted({row.row[group] for row in rows})
    ]


def one_efficiency(rows: list[Row], inside: bool, known: list[Row] | None = None) -> dict[int, float]:
    """Predicts with the median share of peak that other models (inside: all) reach on the same machine in the same precision.

    known: the rows that give that share; None: the rows themselves.
    """
    found = {}
    share = {row.row["id"]: row.flops / row.published / row.peak for row in (*rows, *(known or ()))}
    for row in rows:
        others = [r for r in known or rows if inside or r.row["model"] != row.row["model"]]
        same = [
            r for r in others if (r.row["machine"], r.row["precision"]) == (row.row["machine"], row.row["precision"])
        ]
        same = same or [r for r in others if r.row["machine"] == row.row["machine"]] or others
        found[row.row["id"]] = float(np.median([share[r.row["id"]] for r in same])) / share[row.row["id"]] - 1
    return found


def order(rows: list[Row], error: dict[int, float], same: tuple[str, ...], differ: tuple[str, ...]) -> str:
    """How many pairs of rows, equal in `same` and different in `differ`, whose speeds differ by more than 5 %, are ordered as published."""
    right = total = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            alike = all(a.row[key] == b.row[key] for key in same)
            unlike = any(a.row[key] != b.row[key] for key in differ)
            if not alike or not unlike or abs(a.published / b.published - 1) <= 0.05:
                continue
            total += 1
            mine = [(1 / row.published) * (1 + error[row.row["id"]]) for row in (a, b)]
            right += (mine[0] > mine[1]) == (a.published < b.published)
    return f"{right} of {total}" + (f" ({right / total:.0%})" if total else "")


def releases(rows: list[Row]) -> str:
    """How much the speed of the same layout varies over releases."""
    keys = (
        "model",
        "machine",
        "precision",
        "gpus",
        "global_batch",
        "micro_batch",
        "tensor",
        "pipeline",
        "virtual",
        "expert",
    )
    groups: dict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.row[key] for key in keys)].append(row.row["tokens"])
    spread = [max(v) / min(v) - 1 for v in groups.values() if len(v) > 1]
    return f"{len(spread)} layouts in more than one release: fastest over slowest median {np.median(spread):.1%}, p90 {np.quantile(spread, 0.9):.1%}, worst {max(spread):.1%}"


def signed(found: dict[int, float]) -> str:
    return f"{summary(found)}   median signed {np.median(list(found.values())):+.1%}"


def of(rows: list[Row], error: dict[int, float]) -> dict[int, float]:
    """The errors of those rows."""
    return {row.row["id"]: error[row.row["id"]] for row in rows}


def roofline(rows: list[Row]) -> dict[int, float]:
    return {row.row["id"]: row.published * row.peak / row.flops - 1 for row in rows}


def by(rows: list[Row], error: dict[int, float], group: str) -> None:
    """Prints the errors of each value of that column."""
    for name in sorted({row.row[group] for row in rows}):
        print(f"    {name:32s}   {signed(of([row for row in rows if row.row[group] == name], error))}")


BLIND = {
    "each layout left out": ("model", "machine", "precision", *LAYOUT),
    "each model on a machine left out": ("model", "machine"),
    "each model left out": ("model",),
    "each machine left out": ("machine",),
    "each release left out": ("release",),
}


def print_fitted(fit: Fit, rows: list[Row], odd: list[Row], fitted: Constants) -> dict[str, dict[int, float]]:
    """Prints the predictors' errors on the fitted rows; returns the errors of each kind of cross-validation."""
    print(
        f"free constants: {len(fit.shared)} shared, {len(fit.machines)} machines; {len(rows)} rows, {len(odd)} with unusual kernels excluded"
    )
    print(f"bare roofline at the recipe's peak     {summary(roofline(rows))}")
    print(f"one efficiency, each model left out    {summary(one_efficiency(rows, False))}")
    print(f"one efficiency, in sample              {summary(one_efficiency(rows, True))}")
    print(f"this model, in sample                  {signed(errors(rows, fitted))}")
    found = {}
    for words, groups in BLIND.items():
        found[words] = left_out(fit, rows, groups)
        print(f"this model, {words:32s}   {signed(found[words])}")
        if len(groups) == 1:
            by(rows, found[words], groups[0])
    print(f"unusual kernels (GPT-OSS), not fitted  {signed(errors(odd, fitted))}")
    return found


def print_pairs(rows: list[Row], using: Constants) -> None:
    """Prints tensorwise FP8 against MXFP8 at equal layout."""
    key = lambda row: tuple(row.row[name] for name in ("release", "model", "machine", *LAYOUT))  # noqa: E731
    other = {key(row): row for row in rows if row.row["precision"] == "MXFP8"}
    found = [(row, other[key(row)]) for row in rows if row.row["precision"] == "FP8" and key(row) in other]
    right = 0
    for one, two in found:
        gains = two.published / one.published - 1, two.predicted(using) / one.predicted(using) - 1
        right += gains[0] * gains[1] > 0
        print(
            f"    {one.row['release']} {one.row['model']} {one.row['machine']}: tensorwise faster by {gains[0]:.1%} published, {gains[1]:.1%} predicted"
        )
    print(f"tensorwise against MXFP8 at equal layout: {right} of {len(found)} pairs in the published direction")


def print_orders(rows: list[Row], out: dict[int, float]) -> None:
    print(f"order of layouts                       {order(rows, out, ('model', 'machine', 'precision'), LAYOUT)}")
    print(f"order of machines                      {order(rows, out, ('model', 'release'), ('machine',))}")
    print(f"order of precisions, same release      {order(rows, out, ('model', 'machine', 'release'), ('precision',))}")


def inside(rows: list[Row], using: Constants) -> str:
    """How many published steps lie in the printed band."""
    held = [
        row
        for row in rows
        if abs(1 - row.published / row.predicted(using)) <= _band(row.run, row.run.machine, using)[0]
    ]
    return f"{len(held)} of {len(rows)} ({len(held) / len(rows):.0%})"


def print_unfitted(rows: list[Row], fitted: list[Row], using: Constants) -> None:
    """Prints errors on rows of releases without fitted rows."""
    usual = [row for row in rows if row.row["model"] not in UNUSUAL]
    odd = [row for row in rows if row.row["model"] in UNUSUAL]
    print("releases that were not fitted; the same constants as above")
    print(f"bare roofline at the recipe's peak     {summary(roofline(usual))}")
    print(f"one efficiency of the fitted rows      {summary(one_efficiency(usual, False, fitted))}")
    print(f"this model                             {signed(errors(usual, using))}   in the band {inside(usual, using)}")
    for group in ("release", "model", "machine"):
        by(usual, errors(usual, using), group)
    print(f"unusual kernels (GPT-OSS)              {signed(errors(odd, using))}")


def print_worst(rows: list[Row], error: dict[int, float], most: int) -> None:
    by = {row.row["id"]: row.row for row in rows}
    for ident in sorted(error, key=lambda i: -abs(error[i]))[:most]:
        row = by[ident]
        print(
            f"  {error[ident]:+.0%}  {row['release']:9s} {row['model']:18s} {row['machine']:6s} {row['precision']:6s} mbs {row['micro_batch']} tp {row['tensor']} pp {row['pipeline']} vp {row['virtual']} ep {row['expert']} {row['settings']}"
        )


def write(fit: Fit, fitted: Constants, rows: list[Row], blind: dict[str, dict[int, float]], data: dict) -> None:
    for name in fit.shared:
        data["shared"][name]["value"] = round(fitted.shared[name], 4)
    pairs = blind["each model on a machine left out"]
    for name in fit.machines:
        mine = [abs(pairs[row.row["id"]]) for row in rows if row.row["machine"] == name]
        data["machines"][name] |= {
            "value": round(fitted.machines[name], 4),
            "band": round(float(np.quantile(mine, 0.9)), 2),
        }
    terms = {name: max(biases(rows, blind[f"each {name} left out"], name)) for name in ("release", "machine")}
    data["bands"] |= {f"{name} not fitted": round(value, 2) for name, value in terms.items()}
    data["rows"] = [row.row["id"] for row in rows]
    data["releases"] = sorted({".".join(CORES[row.row["release"]].split(".")[:2]) for row in rows})
    DATA.write_text(json.dumps(data, indent=2) + "\n")
    constants.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fitted constants")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N worst rows")
    args = parser.parse_args()
    data = json.loads(DATA.read_text())
    fit = Fit(constants(), data)
    every = [Row(row) for row in timed()]
    others = [row for row in every if row.row["release"] not in FITTED]
    known = [row for row in every if row.row["release"] in FITTED]
    rows = [row for row in known if row.row["model"] not in UNUSUAL]
    fitted = fit.run(rows)
    blind = print_fitted(fit, rows, [row for row in known if row.row["model"] in UNUSUAL], fitted)
    print_orders(rows, blind["each model left out"])
    print(f"bound: {releases(known)}")
    print(f"bound, with releases that were not fitted: {releases(every)}")
    shared = ", ".join(f"{n} {fitted.shared[n]:.3g}" for n in fit.shared)
    print(f"constants: {shared}; {', '.join(f'{n} {fitted.machines[n]:.3f}' for n in fit.machines)}")
    print_worst(rows, blind["each model on a machine left out"], args.worst)
    print_pairs(every, fitted)
    if args.write:
        write(fit, fitted, rows, blind, data)
    print_unfitted(others, rows, replace(constants(), shared=fitted.shared, machines=fitted.machines))
    print_worst(others, errors(others, fitted), args.worst)


if __name__ == "__main__":
    main()
