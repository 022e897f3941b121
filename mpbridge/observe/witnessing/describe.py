"""Describes a loop in words from one step observed on all ranks: storage, compute by module, wire, states, bytes; and the nearest recipe."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.formats import DType, dtype
from mpbridge.common.traits import DEFAULT, engine_names, traits
from mpbridge.interop.stacks.meaning import LABELS, LAYOUT, Meaning, of_policy, rows
from mpbridge.interop.stacks.optimizers import ADAM, optimizer_named
from mpbridge.observe.audit.compute import ORDER, PlaceDtypes
from mpbridge.observe.audit.observe import Observed, merged
from mpbridge.observe.witnessing.loops import Loop
from mpbridge.precision.policy import LossScale
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.wording import HIGH, rule_words

UNSEEN = "not observed"
ONE = "one data-parallel process: no gradient travels"
_STEP = "the optimizer did not step while it was observed"
_Kinds = Mapping[str, Sequence[PlaceDtypes]]
_ROWS = {
    "params": "storage", "grads": "accumulator", "main_grads": "optimizer_reads", "main_params": "main", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq",
}  # fmt: skip
"""Role of tensors -> row of the description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One loop."""

    loop: str
    """Wrapper and optimizer."""
    ranks: int
    meaning: Meaning
    """In the terms in which all stacks are compared (mpbridge.interop.stacks); a row in `unseen` has the most likely value."""
    compute: tuple[tuple[str, str, str], ...]
    """(kind of operation, module with '*' for numbers, dtypes)."""
    linears: Mapping[str, int]
    """Rule -> number of linears that use it."""
    paths: Mapping[str, str]
    """Linear -> its rule."""
    bytes: float
    """Measured on a rank, per parameter of its part of the model: parameters, gradients, main weights, moments."""
    also: Mapping[str, str]
    """Row -> the values of the other tensors, if not all are the same."""
    unseen: Mapping[str, str]
    """Row -> why it could not be observed."""
    scale: float = 1.0

    def rows(self) -> dict[str, str]:
        """Every row of stacks.meaning.LABELS as text."""
        found = rows(self.meaning)
        found["quantization"] = _counts(self.linears)
        if self.meaning.loss_scale is not None:
            found["loss_scale"] = f"{self.scale:g} at this step"
        where = "this rank" if self.ranks == 1 else f"each of {self.ranks} ranks"
        found["bytes"] += f" ({self.bytes:.1f} measured on {where})"
        for row, text in self.also.items():
            found[row] += f", but {text}"
        for row, why in self.unseen.items():
            found[row] = f"{UNSEEN}: {why}"
        return {name: found[name] for name in LABELS}

    def as_data(self) -> dict[str, Any]:
        """The description as JSON types."""
        return {
            "loop": self.loop,
            "ranks": self.ranks,
            **self.rows(),
            "bytes_per_parameter": round(self.bytes, 3),
            "by_module": [{"kind": kind, "module": module, "dtypes": found} for kind, module, found in self.compute],
            "not_observed": dict(self.unseen),
        }


def describe(loop: Loop, ranks: Sequence[Observed], *, stepped: bool, scaled: bool, scale: float) -> Description:
    """The description from what every rank observed. stepped: an update was seen; scaled: losses are multiplied by a scale."""
    unseen: dict[str, str] = dict(loop.unobserved())
    also: dict[str, str] = {}
    kept, grads, read, main, first, second = (_role(ranks, role, also, row) for role, row in _ROWS.items())
    storage, accumulator = kept or DType.FP32, grads or read
    if accumulator is None:
        unseen.setdefault("accumulator", _STEP if not stepped else "no gradient existed when the optimizer stepped")
    for row, found in (("exp_avg", first), ("exp_avg_sq", second)):
        if found is None:
            unseen.setdefault(row, _STEP if not stepped else "the optimizer has none, or none that it exposes")
    if not stepped:
        unseen.setdefault("main", _STEP)
    wire = _wire(ranks, unseen, accumulator or storage)
    kinds = [rank.computed.kinds for rank in ranks if rank.computed is not None]
    # the one whose states differ from Adam's, where the loop has one (Muon beside Adam)
    known = (optimizer_named(name, momentum=True) for name in loop.updaters)
    meaning = Meaning(
        storage=storage,
        compute=_compute(kinds, unseen) or storage,
        autocast=_autocast(ranks, unseen),
        main=DType.FP32 if main is DType.INT16 else main,
        remainders=main is DType.INT16,
        wire=wire,
        accumulator=accumulator or storage,
        optimizer_reads=None if read is accumulator else read,
        exp_avg=first or DType.FP32,
        exp_avg_sq=second or DType.FP32,
        optimizer=next((one for one in known if not one.exp_avg_sq), ADAM),
        sharded=loop.sharded,
        loss_scale=LossScale(initial=scale) if scaled else None,
    )
    paths = {path: found for rank in ranks for (_, found), each in rank.rules.items() for path in each}
    return Description(
        loop=loop.words,
        ranks=len(ranks),
        meaning=meaning,
        compute=_by_module(kinds),
        linears=Counter(paths.values()),
        paths=paths,
        bytes=_bytes(ranks),
        also=also,
        unseen=unseen,
        scale=scale,
    )


def _role(ranks: Sequence[Observed], role: str, also: dict[str, str], row: str) -> DType | None:
    """The dtype of most elements of a role; the others are added to `also` by number of tensors."""
    sizes: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for (kind, _, found), tally in merged(list(ranks)).items():
        if kind == role:
            sizes[found] += max(1, tally.elements)
            tensors[found] += tally.count
    if not sizes:
        return None
    most = sizes.most_common(1)[0][0]
    others = ((count, found) for found, count in tensors.items() if found != most)
    if len(tensors) > 1:
        also[row] = ", ".join(f"{count} of {tensors.total()} tensors {found}" for count, found in others)
    try:
        return dtype(most)
    except BadValue:
        also[row] = f"most are {most}"
        return DType.UINT8


def _wire(ranks: Sequence[Observed], unseen: dict[str, str], otherwise: DType) -> DType:
    travelled = [rank.traffic for rank in ranks if rank.traffic is not None]
    seen = sum((one.reduced for one in travelled), Counter[str]())
    if max((one.ranks for one in travelled), default=1) == 1:
        unseen["wire"] = ONE
        return otherwise
    if not seen:
        unseen["wire"] = "no gradient was reduced"
        return otherwise
    return dtype(seen.most_common(1)[0][0])


def _compute(kinds: Sequence[_Kinds], unseen: dict[str, str]) -> DType | None:
    seen = Counter(found for one in kinds for *_, dtypes in one.get("GEMMs", ()) for found in dtypes)
    plain = {found: count for found, count in seen.items() if " x " not in found}
    if not plain:
        unseen["compute"] = "no GEMM went through torch's dispatcher"
        return None
    most = dtype(max(plain, key=lambda found: plain[found]))
    outputs = {found for one in kinds for *_, dtypes in one.get("outputs of linears", ()) for found in dtypes}
    # the CPU layer multiplies FP16 factors in FP32 and rounds once, as tensor cores do: operands and results are FP16
    return DType.FP16 if most is DType.FP32 and outputs == {"fp16"} else most


def _autocast(ranks: Sequence[Observed], unseen: dict[str, str]) -> DType | None:
    found = {state for rank in ranks if rank.computed for state in rank.computed.autocast}
    if not found:
        unseen["autocast"] = "no linear layer ran"
        return None
    on = sorted(found - {"off"})
    return dtype(on[0]) if on else None


def _by_module(kinds: Sequence[_Kinds]) -> tuple[tuple[str, str, str], ...]:
    """Each kind's modules with layer numbers replaced by '*', one line per dtype."""
    found: dict[tuple[str, str], set[str]] = {}
    for one in kinds:
        fused = {place for place, _, _ in one.get("attention", ())}
        for kind in ORDER:
            for place, _, dtypes in one.get(kind, ()):
                if kind == "softmax" and place in fused:
                    continue  # inside the attention kernel, which is reported under its own name
                found.setdefault((kind, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place)), set()).update(dtypes)
    return tuple((kind, place, "/".join(sorted(dtypes))) for (kind, place), dtypes in found.items())


def _bytes(ranks: Sequence[Observed]) -> float:
    """Mean over ranks of the bytes of parameters, gradients, main weights and moments, per parameter of the rank's part of the model."""
    tallies = [(role, tally) for rank in ranks for (role, _, _), tally in rank.tensors.items()]
    total = sum(tally.bytes for role, tally in tallies if role not in ("buffers", "padding"))
    held = sum(tally.elements for role, tally in tallies if role == "params")
    # a shard counts as its whole parameter
    held += sum(whole - mine for rank in ranks for mine, whole in rank.copies.shards.values())
    return total / held if held else 0.0


def _counts(linears: Mapping[str, int]) -> str:
    quantized = {rule: count for rule, count in linears.items() if rule != HIGH}
    if not quantized:
        return "none"
    rest = linears.get(HIGH, 0)
    words = [f"{count} of {sum(linears.values())} linears {rule}" for rule, count in quantized.items()]
    return ", ".join([*words, *([f"{rest} in high precision"] if rest else [])])


def lines(description: Description) -> list[tuple[str, str]]:
    """(what, found) for display: the rows, then compute by module, grouped by kind and dtype."""
    found = [(LABELS[row], text) for row, text in description.rows().items()]
    grouped: dict[tuple[str, str], list[str]] = {}
    for kind, module, dtypes in description.compute:
        grouped.setdefault((kind, dtypes), []).append(module)
    for (kind, dtypes), modules in grouped.items():
        found.append((kind, f"{dtypes} ({_few(modules)})"))
    return found


def _few(modules: Iterable[str]) -> str:
    names = [name or "the model itself" for name in modules]
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A recipe compared with what was seen."""

    recipe: str
    differences: Mapping[str, tuple[str, str]]
    """Row -> (the recipe's, what was seen)."""
    other_master: bool = False
    """Whether updates are added to weights of another dtype: then storage and main weights are not just a matter of layout."""

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Rows that change the arithmetic, not only the layout."""
        layout = tuple(row for row in LAYOUT if not (self.other_master and row in ("storage", "main")))
        return tuple(row for row in self.differences if row not in layout)

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.recipe}, exactly"
        kind = "same arithmetic, different layout" if not self.arithmetic else "different arithmetic"
        changes = "; ".join(f"{LABELS[row]}: {seen}, not {ours}" for row, (ours, seen) in self.differences.items())
        return f"{self.recipe} except for ({kind}) {changes}"

    def as_data(self) -> dict[str, Any]:
        """The comparison as JSON types."""
        return {
            "recipe": self.recipe,
            "differences": {row: {"recipe": ours, "seen": seen} for row, (ours, seen) in self.differences.items()},
        }


def nearest(description: Description, *, layers: int) -> Nearest | None:
    """The recipe with the fewest rows of different arithmetic, then of different layout, then first in the registry; None when no recipe can be read."""
    found = [
        one
        for name in recipes
        for engine in dict.fromkeys((recipes[name].engine or DEFAULT, *_engines(description)))
        if (one := _compared(name, engine, description, layers)) is not None
    ]
    return min(found, key=lambda one: (len(one.arithmetic), len(one.differences)), default=None)


def _engines(description: Description) -> tuple[str, ...]:
    """mpbridge's engines with the same layout as this loop; a recipe is compared on each of them."""
    names = engine_names() if description.meaning.sharded == "everything" else ()
    return tuple(name for name in names if traits(name).shards >= {"params", "grads"})


def _compared(name: str, engine: str, description: Description, layers: int) -> Nearest | None:
    try:
        policy = resolve(get_mixed_precision_config(name))
        ours = of_policy(policy, engine=engine, sharded=description.meaning.sharded)
    except MpbridgeError:  # a third-party recipe that does not load
        return None
    mine, theirs = rows(ours), rows(description.meaning)
    skipped = {*description.unseen, "quantization", "loss_scale", "sharded"}
    found = {row: (mine[row], theirs[row]) for row in LABELS if row not in skipped and mine[row] != theirs[row]}
    if (ours.loss_scale is None) is not (description.meaning.loss_scale is None):
        found["loss_scale"] = mine["loss_scale"], theirs["loss_scale"]
    other = sum(rule_words(policy.of_path(path, layers)) != rule for path, rule in description.paths.items())
    if other:
        found["quantization"] = mine["quantization"], f"{description.rows()['quantization']} ({other} linears differ)"
    other_master = "main" not in skipped and ours.master is not description.meaning.master
    return Nearest(recipe=name, differences=found, other_master=other_master)
