"""Rules about Muon, which orthogonalizes the updates of matrices by Newton-Schulz iterations."""

from __future__ import annotations

from mpbridge.common.facts import MUONS
from mpbridge.common.formats import DType, say
from mpbridge.planning.rules.base import PLAIN_WEIGHTS, Case, Rule, faults, warning

NEWTON_SCHULZ = {"medium": "BF16", "high": "TF32 on a GPU", "highest": "FP32"}
"""Value of muon_fp32_matmul_prec -> in what Muon's Newton-Schulz iteration multiplies its FP32 matrices."""


def _muon(case: Case, *names: str) -> bool:
    """Whether megatron-core's Muon would train the run."""
    return case.core and case.run.optimizer.name in (names or MUONS)


def _muon_cannot(case: Case) -> str:
    """What megatron-core's Muon refuses with a bare exception or assertion."""
    return faults(
        "muon with ",
        ("FP16 parameters", case.policy.params is DType.FP16),
        ("the distributed optimizer", case.run.optimizer.distributed),
        ("16-bit parameters as their own main weights", case.own_copy),
    )


def _apart_in_a_gather(case: Case) -> str:
    low = [f"stored {quant.scaling} weights" for quant in case.stored if not quant.row.history][:1]
    found = [*low, *(["keep_fp32"] if case.policy.keep_fp32 else [])]
    return f"dist_muon with {' and '.join(found)}" if found else ""


RULES: tuple[Rule, ...] = (
    Rule(
        id="muon-under-mxfp8",
        about="mxfp8",
        when=lambda c: _muon(c) and "mxfp8" in c.scalings,
        found="muon with MXFP8",
        expected="adam: the updates did not reach the forward pass (a flat loss)",
        cure="optimizer.optimizer=adam, or another recipe",
        source="Megatron-LM#4987, #5707, #6754",
    ),
    Rule(
        id="muon-cannot",
        when=_muon,
        found=_muon_cannot,
        expected="BF16 or FP32 parameters with FP32 main weights, and a Muon without the distributed optimizer (dist_muon shards by itself)",
        cure="a bf16 recipe with ddp.use_distributed_optimizer=false, or optimizer.optimizer=adam",
        source="megatron-core 0.16.1 optimizer/muon.py get_megatron_muon_optimizer",
    ),
    Rule(
        id="muon-gathers-one-dtype",
        when=lambda c: _muon(c, "dist_muon"),
        found=_apart_in_a_gather,
        expected="parameters of one dtype: dist_muon gathers each rank's updated parameters in one buffer",
        cure=f"optimizer.optimizer=muon, or {PLAIN_WEIGHTS} and no keep_fp32",
        source="megatron-core 0.16.1 optimizer/layer_wise_optimizer.py; stored MXFP8 on two ranks failed in the gather",
    ),
    Rule(
        id="newton-schulz-precision-unknown",
        when=lambda c: c.run.optimizer.name in MUONS and c.opt("muon_fp32_matmul_prec", "medium") not in NEWTON_SCHULZ,
        found=lambda c: f"muon_fp32_matmul_prec={say(c.opt('muon_fp32_matmul_prec'))}",
        expected=", ".join(f"{word} ({kind})" for word, kind in NEWTON_SCHULZ.items())
        + ": torch knows no other word, warns, and multiplies in FP32 (megatron-core offers 'low')",
        cure="optimizer.muon_fp32_matmul_prec=medium, or high, or highest",
        source="torch.set_float32_matmul_precision; Megatron-LM training/arguments.py --muon-fp32-matmul-prec (0.16.1 and d98e8a64)",
    ),
    warning(
        id="muon-from-stored-weights",
        about="stored",
        when=lambda c: _muon(c) and c.stored,
        found=lambda c: f"muon with stored {c.stored[0].scaling} weights",
        expected="weights stored in 16 bits: Muon's main weights start from dequantized ones, since only the distributed optimizer asks for the initial values in high precision",
        cure=PLAIN_WEIGHTS,
        source="megatron-core 0.16.1 optimizer.py Float16OptimizerWithFloat16Params, distrib_optimizer.py get_high_precision_init_val",
    ),
    warning(
        id="muon-by-tensor-parallel-blocks",
        when=lambda c: _muon(c) and c.run.parallel.tensor > 1 and c.opt("muon_tp_mode", "blockwise") == "blockwise",
        found="muon_tp_mode=blockwise with {c.run.parallel.tensor} tensor-parallel ranks",
        expected="a mode that orthogonalizes whole matrices: each rank's block by itself gives updates that depend on the number of ranks",
        cure="optimizer.muon_tp_mode=duplicated, or distributed",
        source="megatron-core 0.16.1 optimizer/muon.py TensorParallelMuon",
    ),
)
