"""Rules about parameters that are not trained, and about low-rank adapters beside them."""

from __future__ import annotations

from mpbridge.common.traits import DEFAULT
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.rules.base import PLAIN_WEIGHTS, Case, Rule
from mpbridge.precision.globs import is_adapter
from mpbridge.precision.scalings.row import needs_transpose


def _names(case: Case) -> tuple[str, ...]:
    from mpbridge.planning.memory.layers import model_names

    return model_names(case.run) if case.policy.frozen or case.run.shape.lora_rank else ()


def _nothing_trains(case: Case) -> str | None:
    names = _names(case)
    all_frozen = bool(case.policy.frozen) and all(is_frozen(case.policy, name) for name in names)
    return f"frozen {', '.join(map(repr, case.policy.frozen))} covers every parameter" if all_frozen else None


def _unfollowed(case: Case) -> str | None:
    shape, parallel = case.run.shape, case.run.parallel
    if not shape.lora_rank:
        return None
    adapters = [name for name in _names(case) if is_adapter(name)]
    found = [] if adapters else [f"lora_targets {', '.join(map(repr, shape.lora_targets))} match no linear"]
    found += [f"{parallel.tensor} tensor-parallel ranks"] if parallel.tensor > 1 else []
    found += ["multi-token prediction"] if shape.mtp_layers else []
    found += ["adapters of experts"] if any(".experts." in name for name in adapters) else []
    return f"model.lora_rank={shape.lora_rank} with {', '.join(found)}" if found else None


def _twice_on_hopper(case: Case) -> str | None:
    arch = getattr(case.run.machine, "arch", None)
    copied = [quant for quant in case.stored if not quant.row.stored.both_copies]
    if arch is None or not (case.policy.frozen and copied and needs_transpose(arch)):
        return None
    return f"a frozen base in stored {copied[0].scaling} weights on {case.run.machine.name}"


RULES: tuple[Rule, ...] = (
    Rule(
        id="nothing-is-trained",
        found=_nothing_trains,
        expected="parameters that train: other globs, or adapters, which 'frozen' never covers",
        cure="model.lora_rank=8, or narrower globs in mixed_precision.frozen",
        source="mpbridge/planning/memory/keeps.py is_frozen",
    ),
    Rule(
        id="adapters-do-not-follow",
        found=_unfollowed,
        expected="targets among the linears of attention, MLPs and Mamba layers, on one tensor-parallel rank",
        cure="data or pipeline parallelism (parallel.tensor_model_parallel_size=1), or other model.lora_targets",
        source="mpbridge/backend/models/adapters.py",
    ),
    Rule(
        id="frozen-on-one-engine",
        found=lambda c: (
            (c.policy.frozen or c.run.shape.lora_rank)
            and c.run.engine != DEFAULT
            and f"{'frozen parameters' if c.policy.frozen else 'adapters'} on {c.traits.full_name}"
        ),
        expected=f"engine={DEFAULT}: the others were not tried with parameters that do not train",
        cure=f"engine={DEFAULT}",
        source="mpbridge/backend/models/adapters.py",
    ),
    Rule(
        id="adapters-beside-a-trained-base",
        found=lambda c: (
            c.run.shape.lora_rank
            and not c.policy.frozen
            and f"model.lora_rank={c.run.shape.lora_rank}, and every weight trains too"
        ),
        expected="a frozen base: adapters save the gradients, main weights and moments of what does not train",
        cure="mixed_precision.frozen=['*']",
        source="arXiv 2106.09685",
        severity="warning",
    ),
    Rule(
        id="stored-base-is-kept-twice",
        about="stored",
        found=_twice_on_hopper,
        expected="1 byte per frozen parameter: before Blackwell the transposed copy for dgrad is kept too, and BF16 takes no more",
        cure=f"{PLAIN_WEIGHTS}, or a Blackwell GPU",
        source="Transformer Engine pytorch/tensor/float8_tensor.py; mpbridge/planning/memory/weight_copies.py",
        severity="warning",
        emulated="silent",
    ),
)
