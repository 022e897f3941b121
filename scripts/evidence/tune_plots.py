"""Draws the plots of docs/tuning.md from scripts/evidence/data/tuning.json, which `collect` fills from the output of other scripts and `mpbridge tune`.

    python scripts/evidence/tune_plots.py collect [--recipe tuned.yaml] [--training FOLDER] [--ranks ranks.json ...] [--gaps gaps.json] [--late late.json]
    python scripts/evidence/tune_plots.py draw
    python scripts/evidence/tune_plots.py tables

Data that is not given is kept as it is in the file. `tables` prints the page's tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
DATA = ROOT / "scripts" / "evidence" / "data" / "tuning.json"
COLORS = {"tuned": "tab:green", "all low": "tab:red"}
OTHER = "tab:blue"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("collect", "draw", "tables"))
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--ranks", nargs="*", metavar="NAME=FILE", default=[])
    parser.add_argument("--gaps", type=Path)
    parser.add_argument("--late", type=Path)
    args = parser.parse_args()
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.is_file() else {}
    if args.what == "collect":
        DATA.write_text(json.dumps(data | collected(args), indent=1) + "\n")
    else:
        for line in {"draw": draw, "tables": tables}[args.what](data):
            print(line)


def collected(args: argparse.Namespace) -> dict[str, Any]:
    """From each source, the data that the plots and the page need."""
    found: dict[str, Any] = {}
    if args.recipe is not None:
        import yaml

        evidence = yaml.safe_load(args.recipe.read_text())["evidence"]
        found["choice"] = {name: evidence[name] for name in ("model", "batch", "proof", "scores")}
    if args.training is not None:
        rows = [json.loads(path.read_text()) for path in sorted(args.training.glob("seed*/*.json"))]
        found["training"] = [{key: row[key] for key in ("arm", "seed", "loss", "loss in bf16")} for row in rows]
    for named in args.ranks:
        name, _, file = named.partition("=")
        one = json.loads(Path(file).read_text())
        found.setdefault("ranks", {})[name] = {key: one[key] for key in ("spearman", "halves", "additive")}
    for name in ("gaps", "late"):
        if (file := getattr(args, name)) is not None:
            one = json.loads(file.read_text())
            found[name] = {key: value for key, value in one.items() if key != "rows"}
    return found


def gaps(rows: list[dict[str, Any]], field: str) -> dict[str, list[float]]:
    """Arm -> its losses above BF16's, thousandths of a nat per token, for the seeds that have both; smallest first."""
    base = {row["seed"]: row[field] for row in rows if row["arm"] == "bf16"}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["arm"] != "bf16" and row["seed"] in base:
            found.setdefault(row["arm"], []).append(1e3 * (row[field] - base[row["seed"]]))
    return dict(sorted(found.items(), key=lambda item: statistics.fmean(item[1])))


def interval(values: list[float]) -> float:
    """Half width of the mean's 95 % interval (Student's t); nan for one value."""
    from tune_training import STUDENT

    return STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def tables(data: dict[str, Any]) -> list[str]:
    """Lines of Markdown: scores by model, losses after training, scores against losses."""
    lines = [*_rank_lines(data["ranks"]), ""] if "ranks" in data else []
    if "training" in data:
        lines += _training_lines(data["training"])
    if "gaps" in data:
        lines += ["", "| score | by seed | with the repetition |", "|---|---|---|"]
        for name, one in data["gaps"]["spearman"].items():
            cells = [", ".join(f"{value:.1f}" for value in one[key]) for key in ("each", "again")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rank_lines(models: dict[str, Any]) -> list[str]:
    lines = ["| score | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
    names = next(iter(models.values()))["spearman"]
    lines += [
        f"| {name} | " + " | ".join(f"{one['spearman'][name]:.2f}" for one in models.values()) + " |" for name in names
    ]
    for key, words in (
        ("halves", "one half of the scoring batches with the other"),
        ("additive", "sum of single squared errors over the joint one"),
    ):
        lines.append(f"| {words} | " + " | ".join(f"{one[key]:.2f}" for one in models.values()) + " |")
    return lines


def _training_lines(rows: list[dict[str, Any]]) -> list[str]:
    trained, weights = gaps(rows, "loss"), gaps(rows, "loss in bf16")
    lines = ["| arm | seeds | loss above BF16's | weights evaluated in BF16 |", "|---|---|---|---|"]
    for name, mine in trained.items():
        cells = " | ".join(f"{statistics.fmean(some):+.1f} ± {interval(some):.1f}" for some in (mine, weights[name]))
        lines.append(f"| {name} | {len(mine)} | {cells} |")
    pairs = {name: {row["seed"]: row["loss"] for row in rows if row["arm"] == name} for name in trained}
    for name in pairs:
        if name != "tuned" and (both := sorted(pairs["tuned"].keys() & pairs[name].keys())):
            off = [1e3 * (pairs[name][seed] - pairs["tuned"][seed]) for seed in both]
            lines.append(
                f"{name} above tuned, paired: {statistics.fmean(off):+.2f} ± {interval(off):.2f} ({len(off)} seeds)"
            )
    twice = [abs(pairs["all low"][seed] - loss) * 1e3 for seed, loss in pairs.get("all low, other bits", {}).items()]
    return [*lines, f"A/A differences: {', '.join(f'{one:.2f}' for one in twice)}"]


def draw(data: dict[str, Any]) -> list[str]:
    """Writes docs/tuning_*.png for the available data; returns their names."""
    from mpbridge.common.report.curves import pyplot

    plt, drawn = pyplot(), []
    for name, needs, picture in (
        ("choice", "choice", _choice),
        ("training", "training", _training),
        ("ranks", "ranks", _ranks),
    ):
        if needs not in data:
            continue
        figure = picture(plt, data[needs])
        path = ROOT / "docs" / f"tuning_{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=90, metadata={"Software": None})
        plt.close(figure)
        drawn.append(str(path.relative_to(ROOT)))
    return drawn


def _choice(plt: Any, choice: dict[str, Any]) -> Any:
    """Plots error against cost for every choice, and where the damage is."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(1.2, 1))
    for name, one in choice["proof"].items():
        left.errorbar(one["cost"], one["error"], yerr=one["se"], fmt="o", capsize=3, color=COLORS.get(name, OTHER))
        if name.startswith("random") and name != "random 1":
            continue
        name = name.replace("random 1", "three random choices")
        left.annotate(name, (one["cost"], one["error"]), textcoords="offset points", xytext=(6, 4), fontsize=8)
    left.set(xlabel="GEMM time over all low's", ylabel="gradient error on unseen batches", ylim=(0, None))
    left.margins(x=0.2)
    kinds = list(choice["scores"])
    layers = sorted({int(layer) for kind in kinds for layer in choice["scores"][kind]["low"]})
    damage = [[choice["scores"][kind]["low"].get(str(layer), math.nan) for layer in layers] for kind in kinds]
    whole = math.fsum(value for row in damage for value in row if value == value)
    image = right.imshow([[100 * value / whole for value in row] for row in damage], aspect="auto", cmap="Reds")
    right.set(xticks=range(len(layers)), xticklabels=layers, xlabel="layer", yticks=range(len(kinds)))
    right.set_yticklabels([kind.removeprefix("self_attention.").removeprefix("mlp.") for kind in kinds], fontsize=8)
    figure.colorbar(image, ax=right, label="% of all low's damage")
    return figure


def _training(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Plots gaps to BF16 after training, seed by seed, with 95 % intervals of the mean."""
    figure, both = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for axes, field, title in zip(
        both, ("loss", "loss in bf16"), ("evaluated as trained", "weights evaluated in BF16"), strict=True
    ):
        found = gaps(rows, field)
        # one order for both
        arms = {name: found[name] for name in gaps(rows, "loss")}
        for place, (name, mine) in enumerate(arms.items()):
            axes.plot(mine, [place] * len(mine), ".", color="gray", alpha=0.6)
            half = interval(mine)
            axes.errorbar(
                statistics.fmean(mine),
                place,
                xerr=0 if math.isnan(half) else half,
                fmt="o",
                capsize=4,
                color=COLORS.get(name, OTHER),
            )
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(
            xlabel="loss above BF16's, thousandths of a nat per token",
            title=title,
            yticks=range(len(arms)),
            yticklabels=list(arms),
        )
    return figure


def _ranks(plt: Any, ranks: dict[str, Any]) -> Any:
    """Plots rank correlations of scores with the gradient error, by model."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    names = list(next(iter(ranks.values()))["spearman"])
    high = 0.8 / len(ranks)
    for number, (model, one) in enumerate(ranks.items()):
        places = [place + number * high for place in range(len(names))]
        axes.barh(places, [one["spearman"][name] for name in names], height=high, label=model)
    axes.set(yticks=[place + 0.4 - high / 2 for place in range(len(names))], xlim=(-1, 1))
    axes.set_yticklabels(names, fontsize=8)
    axes.set_xlabel("Spearman's correlation with the squared gradient error of one decision alone")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
