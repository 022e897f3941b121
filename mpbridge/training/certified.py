"""What a certificate needs to know of a run: its schedule, weight scale and micro-batches, and tensors from a file or a run's statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.planning.certificates import Row, Training
from mpbridge.settings.huggingface.folder import header
from mpbridge.settings.schema import defaults

if TYPE_CHECKING:
    import torch

    from mpbridge.numerics.certificates.figures import Linear
    from mpbridge.observe.telemetry.records import MeasuredStep
    from mpbridge.settings.container import Run

STANDARD_DEVIATION = 0.02
"""megatron-core's init_method_std."""
POINTS = 49
ELEMENTS = 1 << 18
"""Elements of a weight that are read: whole rows from its beginning."""
MOST = 4
"""Tensors of a file that are certified, largest first."""


def training_of(run: Run, *, whole: bool = False, sigma: float | None = None) -> Training:
    """A run's learning rates and states. whole: the whole schedule by megatron-core, which it imports; else its highest and its last rate."""
    section = {**defaults("optimizer"), **{k: v for k, v in run.inputs["optimizer"].items() if v is not None}}
    model = run.inputs["model"]
    peak, last = (float(section.get(name) or 0.0) for name in ("lr", "min_lr"))
    ends = ((0.0, peak), *(((1.0, last),) if last else ()))
    micro = int(run.train["micro_batch_size"]) * run.facts.parallel.data
    return Training(
        sigma=sigma or float(model.get("init_method_std") or STANDARD_DEVIATION),
        points=_schedule(run) if whole and peak else ends,
        name=run.facts.optimizer.name,
        beta1=float(section["adam_beta1"]),
        beta2=float(section["adam_beta2"]),
        eps=float(section["adam_eps"]),
        weight_decay=float(section["weight_decay"]),
        micro_batches=max(1, int(run.train["global_batch_size"]) // max(micro, 1)),
    )


def _schedule(run: Run) -> tuple[tuple[float, float], ...]:
    """(share of the run, learning rate) from megatron-core's own scheduler."""
    from mpbridge.training.base import scheduler

    group: dict[str, Any] = {"lr": 0.0, "max_lr": None, "min_lr": None}
    made = scheduler(run, SimpleNamespace(param_groups=[group]))
    total = int(run.train["train_iters"]) * int(run.train["global_batch_size"])
    points = []
    for index in range(POINTS):
        made.num_steps = round(index / (POINTS - 1) * total)
        points.append((index / (POINTS - 1), float(made.get_lr(group))))
    return tuple(points)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTensors:
    """What `--tensors` names."""

    linears: Mapping[str, Linear]
    sigma: float | None = None
    """Median RMS of a run's weight matrices."""
    rows: tuple[Row, ...] = ()
    """What the run itself measured of the operands of these linears."""


def own_tensors(given: Path) -> OwnTensors:
    """A safetensors file, or a run's folder: its operands, if it kept any, and its last measured step. Raises BadValue, Contradiction."""
    if not given.is_dir():
        return OwnTensors(linears=tensors_of(given))
    from mpbridge.observe.telemetry.probe import WINDOWS
    from mpbridge.observe.telemetry.records import read

    measured = read(given).measured
    rows = measured[-1].tables["weights"] if measured else []
    sizes = [
        row["rms"] for row in rows if "norm" not in row["parameter"] and "bias" not in row["parameter"] and row["rms"]
    ]
    if not sizes:
        raise BadValue(
            f"--tensors {given}: no measured weights (expected a run with logger.precision_every=N, or a safetensors file)"
        )
    linears = tensors_of(given / WINDOWS) if (given / WINDOWS).is_file() else {}
    beside = tuple(row for name in linears for row in _measured(measured[-1], name))
    import statistics  # slow to import

    return OwnTensors(linears=linears, sigma=float(statistics.median(sizes)), rows=beside)


def _measured(step: MeasuredStep, linear: str) -> Iterator[Row]:
    from mpbridge.numerics.operands import COPY_OF

    for row in step.tables["operands"]:
        if row["linear"] != linear or row["sqnr"] is None:
            continue
        figures = {
            "MSE, as the run measured": 10 ** (-row["sqnr"] / 10),
            "flushed, as the run measured": row["flushed"],
        }
        for gemm in row["gemms"].split("+"):
            where = f"{gemm} {row['side']} {COPY_OF[gemm, row['side']]}"
            for quantity, value in figures.items():
                yield Row(part="operand", where=where, tensor=f"yours: {linear}", quantity=quantity, value=value,
                          condition=f"step {step.step}, {row['scaling']} in {row['format']}")  # fmt: skip


def tensors_of(file: Path) -> dict[str, Linear]:
    """Linears of a safetensors file: `x`, `w` and `dy` (or NAME.x ...), else its largest matrices as weights. Raises BadValue, Contradiction."""
    import torch
    from safetensors import safe_open

    from mpbridge.numerics.certificates.figures import TOKENS, Linear

    stored = header(file.parent, file.name)
    shapes = {name: list(one.shape) for name, one in stored.items() if one.dtype in ("F32", "BF16", "F16", "F64")}
    names = {name.rpartition(".")[0] for name in shapes if name.rpartition(".")[2] in ("x", "dy")}
    found: dict[str, Linear] = {}
    with safe_open(file, framework="pt") as stream:

        def read(name: str) -> torch.Tensor:
            return _few(name, stream.get_slice(name), shapes[name])

        if names:
            return {base or file.stem: _linear(base, shapes, read) for base in sorted(names)[:MOST]}
        matrices = [name for name, shape in shapes.items() if len(shape) == 2 and min(shape) >= 128]
        matrices.sort(key=lambda name: -math.prod(shapes[name]))
        if not matrices:
            raise BadValue(f"--tensors {file}: no matrix of at least 128 by 128 (expected x, w and dy, or weights)")
        for name in matrices[:MOST]:
            w, generator = read(name), torch.Generator().manual_seed(0)
            dy, x = (torch.randn((TOKENS, width), generator=generator) for width in w.shape)
            found[f"{name}, x and dy drawn"] = Linear(x=x, w=w, dy=dy)
    return found


def _linear(base: str, shapes: dict[str, list[int]], read: Any) -> Linear:
    from mpbridge.numerics.certificates.figures import Linear

    prefix = f"{base}." if base else ""
    missing = [f"{prefix}{side} is missing" for side in ("x", "w", "dy") if f"{prefix}{side}" not in shapes]
    if missing:
        raise Contradiction(missing, subject=f"the tensors of {base or 'the file'} are not those of a linear")
    x, w, dy = (read(f"{prefix}{side}") for side in ("x", "w", "dy"))
    tokens = min(x.shape[0], dy.shape[0])
    if x.shape[1] != w.shape[1] or dy.shape[1] != w.shape[0]:
        raise BadValue(
            f"{prefix}x is {list(x.shape)}, w {list(w.shape)}, dy {list(dy.shape)}: expected [tokens, in], [out, in], [tokens, out]"
        )
    return Linear(x=x[:tokens], w=w, dy=dy[:tokens])


def _few(name: str, stored: Any, shape: list[int]) -> torch.Tensor:
    """Whole rows, in FP32, cut to multiples of 128: the largest block, so that no padding takes part."""
    if len(shape) != 2 or min(shape) < 128:
        raise BadValue(f"{name} has the shape {shape}: expected a matrix of at least 128 by 128")
    columns = shape[1] // 128 * 128
    rows = max(128, min(shape[0], ELEMENTS // columns) // 128 * 128)
    found: torch.Tensor = stored[:rows, :columns].float()
    bad = int((~found.isfinite()).sum())
    if bad or not found.any():
        raise BadValue(f"{name} has {f'{bad} values that are not finite' if bad else 'nothing but zeros'}: expected numbers, whose rounding has an error")  # fmt: skip
    return found
