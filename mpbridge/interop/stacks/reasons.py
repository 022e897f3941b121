"""What a difference between two setups comes to: why a fact of a recipe is otherwise in another stack, or the nearest equivalent there (one row per fact,
one table for all stacks); what one setup costs or loses compared with another (bytes kept, bytes sent, mantissa bits); and whether a checkpoint can be
used by the other: first by its format, then by the precision of its contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.formats import DType
from mpbridge.common.traits import traits
from mpbridge.interop.stacks.meaning import Meaning, arithmetic_differs, differences

_SCALER = "torch's GradScaler halves at every overflow and has no minimum"
_AWARE = "it has an effect only with --use-precision-aware-optimizer"
_ONE_DTYPE = "the whole model is in one dtype"
_WIDE = "norms, softmax and loss run in FP32, in more memory"
REASONS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    # row of a comparison -> stacks, '' for those that are not named -> the reason
    "storage": {"megatron-lm": "checkpoints hold 16-bit parameters and FP32 main weights"},
    "main": {
        "": "they start from FP32 values, not from values rounded to 16 bits, and 16-bit gradients are cast up before they are added",
        "megatron-lm": "Megatron-LM's main weights start from the parameters rounded to 16 bits",
    },
    "autocast": {
        "megatron-lm": "no flag; weights and activations are cast by the model instead",
        "megatron-bridge": "autocast_enabled has no effect on megatron-core there (its name is enable_autocast)",
        "automodel": "distributed.autocast_dtype exists, but no language-model recipe reads it",
        "lightning transformers": _WIDE,
        "deepspeed": "torch_autocast, with FP32 storage, instead of bf16.enabled",
    },
    "wire": {"torchtitan": "mixed_precision_reduce takes float32 only", "lightning": "torch DDP reduces in the parameter's dtype"},
    "accumulator": {
        "": "the reduced gradient accumulates in the parameter's dtype",
        "megatron-lm megatron-bridge": "one setting for both; only Megatron-FSDP's three dtypes separate them (--engine megatron_fsdp)",
        "deepspeed": "",
    },
    "exp_avg": {"megatron-lm": _AWARE},
    "exp_avg_sq": {"megatron-lm": _AWARE},
    "sharded": {"deepspeed": "written for ZeRO 1, whose accumulator can be FP32; imported, it becomes a recipe of the megatron-core engine"},
    "reuse_grad_buffer": {"megatron-lm": "the switch has an effect only with --fp8-format"},
    "loss_scale": {
        "": _SCALER,
        "automodel torchtitan": "it has no loss scaler: small FP16 gradients vanish",
        "accelerate": f"{_SCALER}; fp8 has no scaler at all",
        "lightning": f"FSDPPrecision accepts no custom scaler, and the FP8 plugin has none; {_SCALER}",
        "transformers": f"no argument of it reaches the scaler; {_SCALER}",
        "deepspeed": "only fp16 has a loss scale; its initial value is a power of two, its window and minimum are whole numbers above 0",
    },
    "keep_fp32": {
        "": "one dtype for every parameter",
        "megatron-bridge": "one dtype for every parameter: FP32 adapters end in BF16 too (ParallelLinearAdapter, then Float16Module)",
        "automodel": "a module keeps the dtype of its checkpoint: store them in FP32 there",
        "fsdp2 accelerate": "pass them as ignored_params: neither cast nor sharded",
        "transformers": "the model's own _keep_in_fp32_modules",
        "deepspeed": "data_types.keep_in_fp32_modules keeps buffers of named modules, no parameters",
    },
    "frozen": {
        "": "no setting of precision: the script sets requires_grad",
        "megatron-bridge": "its peft section freezes the base",
        "automodel": "its peft section freezes the base",
    },
    "output": {"": "no setting: as computed"},
    "pipeline": {
        "": "stages send what they computed",
        "megatron-lm": "no flag; FP32 under --fp32-residual-connection, else the parameters' dtype",
        "automodel": "distributed.pipeline derives it",
        "accelerate lightning transformers": "it has no pipeline for training",
    },
    "logits": {
        "": "the model's code decides, or its loss upcasts them afterwards",
        "megatron-lm": "the flag exists from core 0.20 on, for bf16 and fp32",
        "megatron-bridge": "an argument of GPTModel that its providers do not set",
        "fsdp2": "cast the output layer's result, or give that module an mp_policy of its own",
        "deepspeed": _ONE_DTYPE,
    },
    "router": {
        "": "the model's code decides",
        "torchtitan": "its router computes in FP32",
        "deepspeed": "its TopKGate computes in FP32 where the model uses deepspeed.moe, else the model's code decides",
    },
    "residual_fp32": {"": "the blocks' inputs are cast to the compute dtype", "transformers deepspeed": _ONE_DTYPE},
    "softmax_fp32": {"": "the attention kernel decides"},
    "optimizer": {
        "": "it is not written: the script makes the optimizer, and bytes are those of Adam",
        "fsdp2": "torch's own takes whole matrices, not the shards of fully_shard",
        "automodel torchtitan": "no class of that arithmetic is known to be there",
        "deepspeed": "its own of that name, where it has one, multiplies and scales otherwise",
        "megatron-lm": "--optimizer knows it from core 0.18 on",
    },
    "quantization": {
        "megatron-lm": "--fp8-recipe tensorwise",
        "megatron-bridge": "fp8_recipe: tensorwise",
        "automodel": "te_fp8.recipe: mxfp8, or BF16",
        "torchtitan": "Float8LinearConverter with recipe_name='rowwise'",
        "fsdp2": "torchao's rowwise or mxfp8",
        "accelerate": "TERecipeKwargs(use_mxfp8_block_scaling=True)",
        "lightning": "TransformerEnginePrecision with DelayedScaling",
        "transformers": "accelerate launch --mixed_precision fp8, which decides by its own file",
        "deepspeed": "16-bit GEMMs",
    },
    "modules": {
        "megatron-lm": "--te-precision-config-file names a scaling and a format for whole linears, of layers counted from the start; give --config for its depth",
        "megatron-bridge": "model.quant_recipe is a Python object there: use the precision.yaml of --to megatron-lm with load_quantization_recipe",
        "automodel": "fp8.filter_fqns excludes modules by substrings of the model's own names",
        "torchtitan": "several converters, whose fqns and filter_fqns are substrings of the model's own names",
        "fsdp2 accelerate": "torchao's filter function takes the model's own names",
        "lightning": "TransformerEnginePrecision(replace_layers=False) on a model whose linears are Transformer Engine's where you want them",
        "transformers": "accelerate's own file of FP8 settings",
        "deepspeed": "16-bit GEMMs",
    },
    "edge layers": {
        "automodel": "fp8.filter_fqns needs the numbers of the last layers: pass --config, whose depth is then used",
        "accelerate": "TERecipeKwargs converts every layer",
        "lightning": "TransformerEnginePrecision(replace_layers=False) on a model whose other layers are Transformer Engine's",
    },
})  # fmt: skip


def reasons(stack: str, theirs: Meaning) -> dict[str, str]:
    """Row -> the reason in a stack whose meaning is `theirs`."""
    found: dict[str, str] = {}
    for row, texts in REASONS.items():
        own = next((text for stacks, text in texts.items() if stack in stacks.split()), None)
        found[row] = texts.get("", "") if own is None else own
    if found["main"] == REASONS["main"][""] and (theirs.main is not None or theirs.storage is not DType.FP32):
        found["main"] = ""  # it is about FP32 parameters that are updated themselves
    return {row: text for row, text in found.items() if text}


_ROUNDED = ("compute", "autocast", "wire", "accumulator", "exp_avg", "exp_avg_sq", "output", "pipeline", "logits", "router")  # fmt: skip
"""Rows whose dtype rounds the values that pass through."""
_SENT = {"wire": "gradients on the wire", "pipeline": "activations between stages"}
"""Rows whose dtype decides how much is sent."""
_TIMES = {0.5: "half", 2.0: "twice"}


def cost(row: str, ours: Meaning, theirs: Meaning) -> str:
    """The cost of `theirs` relative to `ours` in a row where they differ ('2 bytes per parameter more'); '' if it has no number.

    Bytes are per parameter of a dense model before anything is divided over ranks; bits those of the mantissa.
    """
    if row in ("quantization", "stored"):
        return _of_quantized(ours, theirs)
    found = []
    before, after = _held(row, ours, theirs), _held(row, theirs, ours)
    if before != after:
        copied = row == "accumulator" and ours.held["optimizer_reads"] != theirs.held["optimizer_reads"]
        copy = " with the optimizer's copy" if copied else ""
        found.append(f"{_count(abs(after - before), 'byte')} per parameter {_than(before, after)}{copy}")
    mine, there = _dtype(row, ours), _dtype(row, theirs)
    if mine is None or there is None:
        return ", ".join(found)
    if row in _SENT and mine.bytes != there.bytes:
        factor = there.bytes / mine.bytes
        found.append(f"{_TIMES.get(factor, f'{factor:g} times')} the bytes of {_SENT[row]}")
    if row in _ROUNDED and mine.mantissa is not None and there.mantissa is not None and there.mantissa < mine.mantissa:
        found.append(f"{_count(mine.mantissa - there.mantissa, 'bit')} of mantissa fewer")
    return ", ".join(found)


def _held(row: str, one: Meaning, other: Meaning) -> int:
    """Bytes of a row; an accumulator's include the copy that the optimizer then needs."""
    held = one.held
    if row == "optimizer_reads" and one.accumulator is not other.accumulator:
        return 0
    return held["accumulator"] + held["optimizer_reads"] if row == "accumulator" else held.get(row, 0)


def _of_quantized(ours: Meaning, theirs: Meaning) -> str:
    """Operand bits of the linears without a rule of their own, and bytes of their stored weights."""
    (operands, weights, low), (operands_there, weights_there, low_there) = _linear(ours), _linear(theirs)
    found = []
    if operands != operands_there:
        found.append(f"operands of {operands_there} bits instead of {operands}")
    if weights != weights_there and (low or low_there):  # else it is the stored parameters' row
        apart = abs(weights_there - weights) / 8
        found.append(f"{apart:g} byte{'' if apart == 1 else 's'} per quantized weight {_than(weights, weights_there)}")
    return ", ".join(found)


def _linear(meaning: Meaning) -> tuple[int, int, bool]:
    """(bits of an operand, bits of a stored weight, whether it is stored quantized) of a linear under the last rule."""
    wide, quants = 8 * meaning.compute.bytes, meaning.regions[-1].rules.distinct
    operand = min((quant.bits for quant in quants), default=wide)
    rests = [quant.bits for quant in quants if quant.stored]
    return operand, min(rests, default=8 * meaning.storage.bytes), bool(rests)


def _dtype(row: str, meaning: Meaning) -> DType | None:
    """The dtype of a row as it acts: without autocast operations run in the compute dtype, and modules hand on what they computed. None: no such tensor."""
    if not meaning.optimizer.keeps(row):
        return None
    value = meaning.in_force(row) if row in ("output", "pipeline") else getattr(meaning, row, None)
    if value is None and row in ("autocast", "output", "pipeline", "logits"):
        return meaning.compute
    return value if isinstance(value, DType) else None


def _than(before: int, after: int) -> str:
    return "more" if after > before else "fewer"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")


OURS = "mpbridge"
"""Stands for a recipe that runs in mpbridge, in place of a stack."""
_MEGATRON = ("megatron-lm", "megatron-bridge")
_FOLDERS: Mapping[str, tuple[str, str]] = MappingProxyType({
    OURS: ("mpbridge convert ckpt:DIR hf:DIR", "mpbridge convert hf:DIR ckpt:DIR"),
    "megatron-lm": ("Megatron Bridge's AutoBridge.export_ckpt", "Megatron Bridge's AutoBridge.import_ckpt"),
    "megatron-bridge": ("AutoBridge.export_ckpt", "AutoBridge.import_ckpt"),
    "torchtitan": ("checkpoint.last_save_in_hf", "checkpoint.initial_load_in_hf"),
    "automodel": ("checkpoint.save_consolidated", "from_pretrained"),
    "fsdp2": ("a full state dict and the model's save_pretrained", "from_pretrained"),
    "accelerate": ("unwrap_model and save_pretrained", "from_pretrained"),
    "transformers": ("save_model", "from_pretrained"),
    "lightning": ("the module's own save_pretrained", "from_pretrained"),
    "deepspeed": ("zero_to_fp32.py and save_pretrained", "from_pretrained"),
})  # fmt: skip
"""Stack -> how its weights are exported to a Hugging Face folder, and how it loads such a folder."""
_MEGATRON_WAYS: Mapping[str, str] = MappingProxyType({
    "megatron-bridge": "Bridge can read Megatron-LM's, using the arguments stored in it; which optimizer states its loader restores is not verified",
    "megatron-lm": "Whether Megatron-LM's loader accepts Bridge's is not verified",
})  # fmt: skip
"""Bridge: training/checkpointing.py at 067f987d, 'extracting config from legacy Megatron-LM checkpoint'."""
ALONE = "the weights are kept: moments, loss scale, schedule and the data position are lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One of the two setups."""

    meaning: Meaning
    stack: str = OURS
    engine: str
    """mpbridge's engine: that of a recipe, or the one that corresponds to a stack's settings."""
    unsaid: tuple[str, ...] = ()
    """What its file says beyond `meaning`: settings that mpbridge cannot express, and contradictions."""


def handover(a: Setup, b: Setup) -> str:
    """What happens to a checkpoint of A in B, in one or two sentences.

    Formats come first: equal dtypes do not help if B cannot read the format. Formats: docs/stacks/index.md.
    """
    one, other = a.meaning.master, b.meaning.master
    rounded = f"B updates {other.short} weights, A {one.short} ones: they are rounded, and converting back does not restore them"
    return ". ".join((_arithmetic(a, b), _way(a, b), *([rounded] if one.bytes > other.bytes else ())))


def _arithmetic(a: Setup, b: Setup) -> str:
    if differences(a.meaning, b.meaning):
        other = arithmetic_differs(a.meaning, b.meaning)
        return "They compute differently" if other else "The same arithmetic, with a different layout of tensors"
    # what only one of the two says beyond its meaning: what two files of one stack both say is the same
    both = set(a.unsaid) & set(b.unsaid) if a.stack == b.stack else set()
    said = [(name, line) for name, one in (("A", a), ("B", b)) for line in one.unsaid if line not in both]
    beyond = "; ".join(f"{name} has {line}" for name, line in said)
    text = f"What mpbridge can express of both is the same, but not all of it: {beyond}"
    return text if beyond else "They mean the same"


def _way(a: Setup, b: Setup) -> str:
    apart, formats = differences(a.meaning, b.meaning), [traits(one.engine).checkpoints for one in (a, b)]
    if a.stack == b.stack == OURS and formats[0] != formats[1]:
        engines = f"Checkpoints of engine {a.engine} cannot be continued with engine {b.engine}"
        through = f"Through a Hugging Face folder (mpbridge convert), only {ALONE}"
        return f"{engines}: names and shapes differ. {through}"
    if a.stack == b.stack == OURS:
        judged = "if mpbridge resume-check, which knows the run, allows it"
        return f"A checkpoint of A can be continued in B {judged if apart else 'unchanged'}"
    if a.stack == b.stack:
        state = "how that loader casts tensors is not verified" if apart else "all dtypes are the same"
        return f"Both are {a.stack}: its own loader decides; {state}"
    if a.stack in _MEGATRON and b.stack in _MEGATRON:
        return f"Both write megatron-core's distributed checkpoints. {_MEGATRON_WAYS[b.stack]}"
    ways = f"Through a Hugging Face folder ({_FOLDERS[a.stack][0]}, then {_FOLDERS[b.stack][1]}), only"
    if a.stack in _MEGATRON and b.stack == OURS and formats[1] == "mcore":
        ways = "checkpoint.load of A's torch_dist folder with --reset-optimizer works, but only"
    return f"A's checkpoints cannot be continued in B. {ways} {ALONE}"
