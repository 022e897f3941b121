"""Whether a checkpoint can be used by another setup: first by its format, then by the precision of its contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.traits import traits
from mpbridge.interop.stacks.meaning import Meaning, arithmetic_differs, differences

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
_MEGATRON_WAYS: Mapping[str, str] = MappingProxyType(
    {
        "megatron-bridge": "Bridge can read Megatron-LM's, using the arguments stored in it; which optimizer states its loader restores is not verified",
        "megatron-lm": "Whether Megatron-LM's loader accepts Bridge's is not verified",
    }
)
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
    return f"{_arithmetic(a, b)}. {_way(a, b)}{_rounded(a, b)}"


def _arithmetic(a: Setup, b: Setup) -> str:
    beyond = _beyond(a, b)
    if differences(a.meaning, b.meaning):
        other = arithmetic_differs(a.meaning, b.meaning)
        return "They compute differently" if other else "The same arithmetic, with a different layout of tensors"
    return (
        f"What mpbridge can express of both is the same, but not all of it: {beyond}"
        if beyond
        else "They mean the same"
    )


def _beyond(a: Setup, b: Setup) -> str:
    """What only one of the two files says beyond its meaning; what two files of one stack both say is the same."""
    both = set(a.unsaid) & set(b.unsaid) if a.stack == b.stack else set()
    sides = (("A", a), ("B", b))
    return "; ".join(f"{name} has {line}" for name, one in sides for line in one.unsaid if line not in both)


def _way(a: Setup, b: Setup) -> str:
    if a.stack == b.stack:
        return _here(a, b) if a.stack == OURS else _there(a, b)
    if a.stack in _MEGATRON and b.stack in _MEGATRON:
        return f"Both write megatron-core's distributed checkpoints. {_MEGATRON_WAYS[b.stack]}"
    if a.stack in _MEGATRON and b.stack == OURS and traits(b.engine).checkpoints == "mcore":
        return f"A's checkpoints cannot be continued in B. checkpoint.load of A's torch_dist folder with --reset-optimizer works, but only {ALONE}"
    ways = f"{_FOLDERS[a.stack][0]}, then {_FOLDERS[b.stack][1]}"
    return f"A's checkpoints cannot be continued in B. Through a Hugging Face folder ({ways}), only {ALONE}"


def _here(a: Setup, b: Setup) -> str:
    if traits(a.engine).checkpoints != traits(b.engine).checkpoints:
        return (
            f"Checkpoints of engine {a.engine} cannot be continued with engine {b.engine}: names and shapes differ."
            f" Through a Hugging Face folder (mpbridge convert), only {ALONE}"
        )
    if not differences(a.meaning, b.meaning):
        return "A checkpoint of A can be continued in B unchanged"
    return "A checkpoint of A can be continued in B if mpbridge resume-check, which knows the run, allows it"


def _there(a: Setup, b: Setup) -> str:
    same = not differences(a.meaning, b.meaning)
    state = "all dtypes are the same" if same else "how that loader casts tensors is not verified"
    return f"Both are {a.stack}: its own loader decides; {state}"


def _rounded(a: Setup, b: Setup) -> str:
    one, other = a.meaning.master, b.meaning.master
    if one.bytes <= other.bytes:
        return ""
    return f". B updates {other.short} weights, A {one.short} ones: they are rounded, and converting back does not restore them"
