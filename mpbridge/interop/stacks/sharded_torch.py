"""Shared by the torch-native stacks, which cast parameters from the dtype that is updated when they are gathered: what they can express, and as which fields it is read.

Also the comment with its meaning above the Python that `export` writes, from which `import` reads it back: the Python itself is neither run nor interpreted.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpbridge.common.errors import BadValue, DataError, MpbridgeError, cut
from mpbridge.common.formats import DType, dtype, say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Fragment, Imported, Line, engine_with, updated_by
from mpbridge.interop.stacks.meaning import Meaning, rows, with_quant
from mpbridge.interop.stacks.optimizers import MOMENTS
from mpbridge.interop.stacks.reading import Reader, base_field, state_word
from mpbridge.precision.policy import LossScale, PrecisionPolicy
from mpbridge.precision.regions import Quant, Region
from mpbridge.precision.wording import quant_text

TORCHAO: Mapping[str, Quant] = {
    "tensorwise": Quant(format="hybrid", scaling="tensorwise"),
    "rowwise": Quant(format="e4m3", scaling="rowwise"),
    "rowwise_with_gw_hp": Quant(format="e4m3", scaling="rowwise_gw_hp"),
}
"""Name of a recipe of torchao 0.18 -> what it runs (float8/config.py)."""
BY_TORCHAO: Mapping[str, tuple[str, Quant]] = {quant.scaling: (name, quant) for name, quant in TORCHAO.items()}


def torch_meaning(
    policy: PrecisionPolicy, *, fused_adam: bool = False, wire: DType | None = None, autocast: bool = False, hands_on: bool = False,
    scaler: LossScale | None = None, regions: tuple[Region, ...] = (Region(),),
) -> Meaning:  # fmt: skip
    """The nearest meaning to `policy` that fully_shard with a MixedPrecisionPolicy and a torch optimizer can express.

    fused_adam: the stack can use Transformer Engine's FusedAdam, with main weights as 16-bit remainders. wire: None: the policy's reduction. autocast: it
    is always on. hands_on: the stack can set the dtype that a wrapped module returns. scaler: the stack's loss scale. regions: the quantization that it
    can express. Other facts that a policy states are missing until the stack's module adds them.
    """
    settled = policy.settled()
    kept = settled.main_params or DType.FP32
    # torch's optimizers update what is stored, FusedAdam can keep FP32 beside BF16; a 16-bit copy in another dtype cannot be expressed: FP32 is nearest
    own, low = kept is settled.params, settled.params is DType.BF16 and kept is DType.FP32
    beside = fused_adam and settled.precision_aware and low
    storage, main = kept if own else settled.params if beside else DType.FP32, DType.FP32 if beside else None
    cast = settled.autocast or settled.compute if autocast and settled.mixed else None
    states = (storage, storage) if main is None else (settled.exp_avg or DType.FP32, settled.exp_avg_sq or DType.FP32)
    output = settled.output if hands_on and settled.output is not settled.compute else None
    return Meaning(
        storage=storage, compute=settled.compute, autocast=cast, main=main, remainders=main is not None,
        wire=wire or settled.reduce, accumulator=storage, exp_avg=states[0], exp_avg_sq=states[1],
        sharded="everything", loss_scale=scaler, regions=regions, output=output, pipeline=output,
    )  # fmt: skip


def regions_there(policy: PrecisionPolicy, words: Mapping[str, Quant], *, edges: bool = False) -> tuple[Region, ...]:
    """The policy's quantization as a stack runs it: without rules by module, stored in 16 or 32 bits, each scaling with its meaning there.

    words: name of a scaling -> what runs under the stack's name for it. edges: whether it can exclude layers at the ends.
    """
    quant = None if policy.quant is None else words.get(policy.quant.scaling)
    ends = [region for region in policy.regions if region.ends and edges and quant is not None]
    return (*ends, Region(quant=quant))


def torch_scaler(policy: PrecisionPolicy) -> LossScale | None:
    """A policy's loss scale as far as torch's GradScaler supports it: initial scale and window, no hysteresis, no minimum."""
    scale = policy.loss_scale
    if scale is None or policy.compute is not DType.FP16:
        return None
    start = scale.static if scale.static is not None else scale.initial
    return LossScale(initial=start, window=scale.window, minimum=0.0, hysteresis=1)


def scaler_arguments(scale: LossScale) -> str:
    """The equivalent arguments of torch's GradScaler and of accelerate's GradScalerKwargs."""
    return f"init_scale={scale.initial!r}, growth_interval={scale.window:g}"


TORCH_SCALER = LossScale(initial=2.0**16, window=2000.0, minimum=0.0, hysteresis=1)
"""torch's GradScaler with its defaults."""


def output_layer(quant: Quant | None, who: str) -> tuple[Line, ...]:
    """A line if a stack converts the output layer too. who: what converts it."""
    if quant is None:
        return ()
    text = f"in high precision here; {who} converts every linear, including the output layer"
    return (Line(fidelity="different", fact="output layer", text=text),)


def noted(theirs: Meaning, lines: Iterable[Line]) -> Meaning:
    """`theirs` with the note that the lines of `output_layer` have no field for."""
    return dataclasses.replace(theirs, note="; ".join(f"{line.fact}: {line.text}" for line in lines))


def filter_lines(policy: PrecisionPolicy, depth: str) -> list[str]:
    """Python source of `quantized(module, name)`: whether a linear belongs to a quantized layer. depth: an expression for the number of layers."""
    first, last = policy.ends or (0, 0)
    return [
        f"depth = {depth}", "",
        "def quantized(module, name):", '    """Whether a linear is in a quantized layer; the output layer is not."""',
        '    number = name.rpartition("layers.")[2].partition(".")[0]',
        f"    return isinstance(module, torch.nn.Linear) and number.isdigit() and {first} <= int(number) < depth - {last}", "",
    ]  # fmt: skip


def environment(quants: Iterable[Quant]) -> tuple[Fragment, ...]:
    """Transformer Engine options that are set only through environment variables; empty if the recipe states none."""
    stated = [(quant.row.option(name), value) for quant in quants for name, value in quant.options]
    said = [option.setting(value) for option, value in stated if option.variable]
    off = " unset"
    words = [f"unset {one.removesuffix(off)}" if one.endswith(off) else f"export {one}" for one in dict.fromkeys(said)]
    return (Fragment(name="environment", text="\n".join(words)),) if words else ()


def process_wide(quants: Sequence[Quant]) -> tuple[Line, ...]:
    """A line for each option with different values in different rules: its variable applies to all linears of a process."""
    found = {}
    for quant in quants:
        for name, value in quant.options:
            option = quant.row.option(name)
            if not option.variable:
                text = f"{name} {say(value)}: {option.setting(value)}; its recipe object has a field for it"
                found[text] = Line(fidelity="different", fact=name, text=text)
            for other in quants if option.variable else ():
                same = next((one for one in other.row.options if one.variable == option.variable), None)
                if same is not None and other.option(same.name) != value:
                    there = f"{quant_text(other)} has {say(other.option(same.name))}"
                    text = f"{option.setting(value)} applies to every linear of the process; here {there}"
                    found[text] = Line(fidelity="different", fact=name, text=text)
    return tuple(found.values())


def fields_of(meaning: Meaning, read: Reader) -> dict[str, Any]:
    """MixedPrecisionConfig fields that express `meaning` on one of mpbridge's FSDP engines; what they cannot express is noted."""
    storage, compute, wire, wide = meaning.storage.short, meaning.compute, meaning.wire, meaning.wire is DType.FP32
    if meaning.storage.bytes < compute.bytes:
        read.cannot(f"storage in {storage} with compute in {compute.short}: storage is narrower than the arithmetic")
        return {}
    fields = {**base_field(compute), "params_dtype": storage, "grad_reduce_in_fp32": wide}
    if meaning.main is None and compute is not DType.FP32:
        fields["main_params_dtype"] = storage
        if meaning.storage is not DType.FP32:
            fields |= {f"{name}_dtype": getattr(meaning, name).short for name in MOMENTS}
            fields |= {} if wide else {"main_grads_dtype": storage}
    elif meaning.main is not None and (meaning.remainders or {meaning.exp_avg, meaning.exp_avg_sq} != {DType.FP32}):
        kept = {"store_param_remainders": meaning.remainders, "main_params_dtype": meaning.main.short}
        fields |= {"use_precision_aware_optimizer": True, **kept}
        fields |= {f"{name}_dtype": state_word(getattr(meaning, name)) for name in MOMENTS}
    if meaning.output is not None:
        fields["output_dtype"] = meaning.output.short
    if meaning.autocast is not None:
        fields |= {"autocast_enabled": True, "autocast_dtype": meaning.autocast.short}
    fields |= quant_fields(meaning.regions)
    # torch FSDP2 accumulates in the stored dtype
    added = meaning.accumulator
    text = f"gradients are reduced in {wire.short} and accumulate in {added.short}"
    read.cannot(text, added not in (wire, meaning.storage))
    return fields if meaning.loss_scale is None else fields | scale_fields(meaning.loss_scale)


def scale_fields(scale: LossScale) -> dict[str, Any]:
    """The fields of a loss scale."""
    fields: dict[str, Any] = {"initial_loss_scale": scale.initial}
    fields |= {"min_loss_scale": scale.minimum} if scale.minimum else {}  # torch's has none
    fields |= {"loss_scale_window": scale.window, "hysteresis": scale.hysteresis}
    return fields | ({} if scale.static is None else {"loss_scale": scale.static})


def left_out(names: Any, who: str, read: Reader) -> tuple[int, int] | None:
    """Layers at the start and end that a substring filter leaves in high precision; None if it names no layers that way.

    Everything else that the filter excludes is noted: in mpbridge only linears of layers are quantized, never the output layer.
    """
    listed = [str(one) for one in names] if isinstance(names, (list, tuple)) else []
    covered = not any("lm_head" in one or one in "lm_head" for one in listed if one)
    numbers = sorted({int(found[1]) for one in listed if (found := _LAYER.fullmatch(one))})
    others = [one for one in listed if one != "lm_head" and not _LAYER.fullmatch(one)]
    first = next((at for at, number in enumerate(numbers) if number != at), len(numbers))
    rest = numbers[first:]
    inside = bool(rest) and rest != list(range(rest[0], rest[0] + len(rest)))
    read.cannot(f"{who}: the output layer (lm_head) is quantized too; here it never is", covered)
    read.cannot(f"{who}: left out by substring: {', '.join(map(cut, others))}", others)
    read.cannot(f"{who}: excludes layers {', '.join(map(str, rest))}, which are not at one end", inside)
    if rest and not inside:
        read.note("assumed", f"{who}: layers {rest[0]} to {rest[-1]} are assumed to be the model's last")
    return (first, len(rest)) if numbers and not inside else None


_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
"""A layer in a substring filter, with the dot after its number."""


def quant_fields(regions: tuple[Region, ...]) -> dict[str, Any]:
    """The fields of one quantization, and of layers at the start and end that it leaves out."""
    *edges, last = regions
    quant = last.quant
    if quant is None:
        return {}
    low = f"fp{quant.bits}"
    fields: dict[str, Any] = {low: quant.format, f"{low}_recipe": quant.scaling}
    if quant.scaling == "delayed":
        fields |= {"fp8_amax_history_len": quant.amax_history, "fp8_amax_compute_algo": quant.amax_algo}
        fields |= {"fp8_margin": quant.margin} if quant.margin else {}
        fields |= {} if quant.wgrad else {"fp8_wgrad": False}
    for edge in edges:
        fields |= {"first_last_layers_bf16": True}
        fields |= {"num_layers_at_start_in_bf16": edge.first, "num_layers_at_end_in_bf16": edge.last}
    return fields


_COMMENT = re.compile(r"[ \t]*# mpbridge export --to (\S+): (\{.*\})[ \t]*")
_DTYPES = tuple(one.name for one in dataclasses.fields(Meaning) if str(one.type).startswith("DType"))
_AS_THEY_ARE = ("remainders", "sharded", "note")
_DEFAULTS = {one.name: one.default for one in dataclasses.fields(Meaning)}
_OPTIMIZER = re.compile(r"\b(AdamW|FusedAdam|adamw_torch|SGD|sgd)\b(?:.*\bmomentum=([\d.]+))?")
"""The optimizers that exports write, and the momentum of those that have it."""


def commented(stack: str, meaning: Meaning, code: str) -> str:
    """`code` below the comment that holds what it means, and by which a later change of it is noticed."""
    said = {name: getattr(meaning, name) for name in (*_DTYPES, *_AS_THEY_ARE)}
    data = {name: value.short if name in _DTYPES else value for name, value in said.items() if value != _DEFAULTS[name]}
    if meaning.loss_scale is not None:
        data["loss_scale"] = _set(meaning.loss_scale)
    *edges, last = meaning.regions
    if last.quant is not None:
        data["quant"] = _set(last.quant)
    if edges:
        data["ends"] = [edges[0].first, edges[0].last]
    data["code"] = [len(code.splitlines()), _sum(code.splitlines())]
    return f"# mpbridge export --to {stack}: {json.dumps(data)}\n{code}"


def _set(value: LossScale | Quant) -> dict[str, Any]:
    said = {one.name: (getattr(value, one.name), one.default) for one in dataclasses.fields(value)}
    return {name: given for name, (given, default) in said.items() if given != default}


def _sum(lines: list[str]) -> int:
    return zlib.crc32("\n".join(line.strip() for line in lines).encode())


def has_comment(text: str) -> bool:
    """Whether some Python was written by `export`."""
    return any(map(_COMMENT.fullmatch, text.splitlines()))


def read_comment(text: str, *, name: str, stack: str | None) -> Imported:
    """What the comment in a Python file says; undecided where the code below it is not what `export` wrote. Raises DataError.

    stack: None: the comment's own.
    """
    lines = text.splitlines()
    found = [(at, one) for at, line in enumerate(lines, 1) if (one := _COMMENT.fullmatch(line))]
    at, comment = next(((at, one) for at, one in found if stack in (None, one[1])), (0, None))
    if comment is None:
        raise DataError(f"{name}: what `mpbridge export` wrote in it is for {found[0][1][1]}, not for {stack}")
    try:
        data = json.loads(comment[2])
        many, expected = data.pop("code")
        code = lines[at : at + many]
        meaning, known = _commented_meaning(data), Reader({})
        known.cannot(f"{meaning.note}: no setting of a recipe", meaning.note)
        fields = fields_of(meaning, known)
        rows(meaning)  # raises for values that are of no use
    except (MpbridgeError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        written = f"the comment `mpbridge export --to {comment[1]}` in line {at}"
        raise DataError(f"{name}: {written} cannot be read: {cut(error)}") from None
    changed = f"the {many} lines below line {at} were changed since `mpbridge export` wrote them, and are not read: export again"
    undecided = [] if _sum(code) == expected else [changed]
    undecided += [f"line {one}: another export, which is not shown" for one, _ in found if one != at]
    made = Imported(
        stack=comment[1], version="", fields=fields, meaning=meaning, cannot_express=tuple(known.notes["cannot_express"]), undecided=tuple(undecided),
        engine=engine_with("optimizer") if meaning.sharded == "everything" else DEFAULT,
    )  # fmt: skip
    optimizer = _OPTIMIZER.search("\n".join(code))
    return updated_by(made, optimizer and optimizer[1], "optimizer", momentum=optimizer and float(optimizer[2] or 0))


def _commented_meaning(data: dict[str, Any]) -> Meaning:
    quant, scale, ends = (data.pop(name, None) for name in ("quant", "loss_scale", "ends"))
    if strange := data.keys() - {*_DTYPES, *_AS_THEY_ARE}:
        raise BadValue(f"unknown: {', '.join(sorted(strange))}")
    said: dict[str, Any] = {name: dtype(value) if name in _DTYPES else value for name, value in data.items()}
    made = None if quant is None else Quant(**{name: _tuples(value) for name, value in quant.items()})
    kinds = {"hysteresis": int}
    numbers: dict[str, Any] = {name: kinds.get(name, float)(value) for name, value in scale.items()} if scale else {}
    meaning = Meaning(**said, loss_scale=LossScale(**numbers) if scale else None)
    return with_quant(meaning, made, (int(ends[0]), int(ends[1])) if ends else None)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
