"""The rows of the table of scalings."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.precision.scalings.row import Block, Hardware, Need, Option, Scaling, Sizes, StoredForm

_TE = "Transformer Engine 2.11"
_CHECKS = f"{_TE} pytorch/quantization.py"
_BASE = f"{_TE} pytorch/utils.py assert_dim_for_fp8_exec"
_SHARD = f"{_TE} pytorch/utils.py, is_quantizable of each tensor class"
_RECIPES = "Transformer Engine common/recipe/__init__.py (read once, at import)"


def _switch(
    name: str, variable: str, *, set_means: bool, since: str, meaning: str, needs: tuple[Need, ...] = ()
) -> Option:
    """A switch that the text '1' changes from its default."""
    return Option(
        name=name, choices=(not set_means, set_means), variable=variable, spelled=(("1", set_means),), since=since,
        meaning=meaning, source=_RECIPES, needs=needs,
    )  # fmt: skip


def _same(*texts: str) -> tuple[tuple[str, str], ...]:
    """Values whose text in the variable is their name."""
    return tuple((text, text) for text in texts)


_BACKWARD = Option(
    name="backward", choices=("quantized", "high_precision", "dequantized"), variable="NVTE_BACKWARD_OVERRIDE",
    spelled=(("high_precision", "high_precision"), ("dequantized", "dequantized")), strict=True, since="2.15",
    meaning="operands of dgrad and wgrad: quantized, the high-precision originals, or the forward copies dequantized", source=_RECIPES,
)  # fmt: skip
_WHOLE = Block(across=0, along=0, scale="fp32")
_FP8 = ("e4m3", "hybrid")
_PER_TENSOR = Sizes(
    tokens=16, inner=16, outer=16, shard=1, expert=16,
    tokens_untransposed=8,  # wgrad then needs no transposed operand, whose leading dimension would be the tokens
    gains_above=(4096, 1024), source=f"{_BASE}; common/gemm/cublaslt_gemm.cu: leading dimensions", shard_source=_SHARD,
)  # fmt: skip
_FLOAT8 = StoredForm(tensor="Float8Tensor", both_copies=False, source=f"{_TE} tensor/storage/float8_tensor_storage.py")

_LINE = Block(across=1, along=0, scale="fp32")
_TRAINING = StoredForm(
    tensor="Float8TrainingTensor", both_copies=True, source="torchao 0.18 float8/float8_training_tensor.py"
)
_AO = Hardware(
    low=(8, 9),
    library="torchao",
    engine="0.13",
    source="torch 2.13 aten/native/cuda/ScaledBlas.cpp: rowwise scales need sm_89",
)
_SCALED_MM = "torch._scaled_mm: trailing dimensions are multiples of 16"

ROWS: tuple[Scaling, ...] = (
    Scaling(
        name="tensorwise", words="FP8 with current (tensorwise) scaling", formats=_FP8, blocks=(_WHOLE, _WHOLE), stored=_FLOAT8,
        hardware=Hardware(low=(8, 9), engine="2.2", source=f"{_CHECKS} check_fp8_support"),
        sizes=_PER_TENSOR, emulation="current", recipes=(("2.2", "Float8CurrentScaling"),), core="tensorwise", attention=("dot_product",),
        options=(
            _switch("power_of_two", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", set_means=True, since="2.2", meaning="scales rounded down to powers of two"),
            _BACKWARD,
        ),
        quantizer="Float8CurrentScalingQuantizer", made_by="current_scaling_factory",
        entry="fp8_current_scaling", substitutes=("delayed",), preference=2,
    ),
    Scaling(
        name="delayed", words="FP8 with delayed scaling", formats=_FP8, blocks=(_WHOLE, _WHOLE), history=True, stored=_FLOAT8,
        hardware=Hardware(low=(8, 9), engine="1.0", source=f"{_CHECKS} check_fp8_support"),
        sizes=_PER_TENSOR, emulation="history", recipes=(("1.0", "DelayedScaling"),), core="delayed", attention=("dot_product", "multi_head"),
        quantizer="Float8Quantizer", entry="fp8_delayed_scaling", substitutes=("tensorwise",), preference=3,
    ),
    Scaling(
        name="blockwise", words="FP8 with blockwise scaling", formats=_FP8,
        blocks=(Block(across=1, along=128, scale="fp32"), Block(across=128, along=128, scale="fp32")),
        # one FP32 scale per 128x128 block, the inner count padded to 4
        stored=StoredForm(tensor="Float8BlockwiseQTensor", both_copies=True, count=4, source=f"{_TE} tensor/float8_blockwise_tensor.py"),
        hardware=Hardware(low=(9, 0), engine="2.3", cuda="12.9", source=f"{_CHECKS} check_fp8_block_scaling_support"),
        sizes=Sizes(tokens=16, inner=16, outer=16, shard=128, expert=16, source=f"{_BASE}; common/gemm/cublaslt_gemm.cu",
                    shard_source=f"{_SHARD}: float8_blockwise_tensor.py"),
        emulation="fp32_blocks", recipes=(("2.3", "Float8BlockScaling"),), core="blockwise",
        computed_as="on Blackwell its blocks are computed as MXFP8, with power-of-two scales (Transformer Engine 2.11 csrc/extensions/gemm.cpp)",
        options=(
            _switch("power_of_two", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", set_means=False, since="2.3", meaning="block scales are powers of two"),
            _BACKWARD,
        ),
        quantizer="Float8BlockQuantizer", made_by="float8_block_scaling_factory",
        entry="fp8_subchannel_scaling", substitutes=("mxfp8", "tensorwise"), preference=1,
    ),
    Scaling(
        name="mxfp8", words="MXFP8", formats=_FP8, blocks=(Block(across=1, along=32, scale="e8m0"),) * 2,
        # rows padded to 128 and blocks to 4, in both directions
        stored=StoredForm(tensor="MXFP8Tensor", both_copies=True, through_grads=True, scale_bytes=1, lines=128, count=4, source=f"{_TE} tensor/mxfp8_tensor.py"),
        hardware=Hardware(low=(10, 0), high=(12, 0), engine="2.1", cuda="12.8", source=f"{_CHECKS} check_mxfp8_support"),
        sizes=Sizes(tokens=32, inner=32, outer=32, shard=32, expert=32, tile=128, source=f"{_TE} csrc/quantizer.cpp, tensor/mxfp8_tensor.py",
                    shard_source=f"{_SHARD}: mxfp8_tensor.py"),
        emulation="e8m0_blocks", recipes=(("2.0", "MXFP8BlockScaling"),), core="mxfp8", square=Block(across=32, along=32, scale="e8m0"),
        options=(
            Option(name="square_weights", choices=(False, True), variable="", spelled=(), since="2.20", meaning="weights have one scale per 32x32 elements",
                   source="Transformer Engine 2.20 common/recipe/__init__.py MXFP8BlockScaling.enable_2d_quantization"),
            _BACKWARD,
        ),
        quantizer="MXFP8Quantizer", made_by="mxfp8_factory",
        entry="mxfp8", substitutes=("blockwise", "tensorwise"), preference=0,
    ),
    Scaling(
        name="nvfp4", words="NVFP4", formats=("e2m1",), blocks=(Block(across=1, along=16, scale="e4m3"), Block(across=16, along=16, scale="e4m3")),
        stored=StoredForm(tensor="NVFP4Tensor", both_copies=True, scale_bytes=1, lines=128, count=4, source=f"{_TE} tensor/nvfp4_tensor.py"),
        hardware=Hardware(low=(10, 0), engine="2.7", cuda="12.8", source=f"{_CHECKS} check_nvfp4_support"),
        sizes=Sizes(tokens=16, inner=16, outer=16, shard=16, expert=128, source=f"{_TE} csrc/quantizer.cpp, tensor/nvfp4_tensor.py",
                    shard_source=f"{_SHARD}: nvfp4_tensor.py"),
        emulation="e4m3_blocks", recipes=(("2.7", "NVFP4BlockScaling"),), core="nvfp4", compute=(DType.BF16,),
        options=(
            _switch("hadamard", "NVTE_NVFP4_DISABLE_RHT", set_means=False, since="2.7",
                    meaning="wgrad's operands are rotated by a random Hadamard transform"),
            _switch("stochastic_rounding", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", set_means=False, since="2.7",
                    meaning="gradients are rounded stochastically"),
            _switch("square_weights", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", set_means=False, since="2.7",
                    meaning="weights have one scale per 16x16 elements"),
            _switch("row_scaled_activations", "NVTE_NVFP4_ROW_SCALED_ACTIVATION", set_means=True, since="2.16",
                    meaning="an activation has one second-level scale per row", needs=(
                        Need(values=(True,), option="hadamard", legal=(False,)),
                        # the columnwise copy of a row-scaled tensor, which wgrad reads, came later
                        Need(values=(True,), option="backward", legal=("high_precision", "dequantized"), until="2.19"),
                    )),
            Option(name="four_over_six", choices=("none", "weights", "activations", "all"), variable="NVTE_NVFP4_4OVER6", strict=True, since="2.17",
                   spelled=_same("none", "weights", "activations", "all"), source=_RECIPES,
                   meaning="which operands choose between mapping a block's largest value to 6 and to 4, by the smaller error (Four Over Six)",
                   needs=(
                       Need(values=("activations", "all"), option="hadamard", legal=(False,)),
                       Need(values=("activations", "all"), option="backward", legal=("high_precision", "dequantized"),
                            beside=("row_scaled_activations", True)),
                   )),
            Option(name="four_over_six_256", choices=("all", "none", "weights", "activations"), variable="NVTE_NVFP4_4OVER6_E4M3_USE_256", strict=True,
                   since="2.17", spelled=_same("none", "weights", "activations", "all"), source=_RECIPES,
                   meaning="which of those operands keep their block scales below 256 instead of 448"),
            Option(name="four_over_six_error", choices=("MAE", "MSE"), variable="NVTE_NVFP4_4OVER6_ERR_MODE", strict=True, since="2.17",
                   spelled=(*_same("MAE", "MSE"), ("mae", "MAE"), ("mse", "MSE")), source=_RECIPES,
                   meaning="the error that decides: the sum of absolute or squared differences"),
            _switch("four_over_six_fast_error", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", set_means=True, since="2.17",
                    meaning="errors are those of the scaled tensor, with fewer roundings"),
            _switch("fast_math", "NVTE_USE_FAST_MATH", set_means=True, since="2.14", meaning="approximate division, no rounding after the transform, and multipliers in BF16 where a cast is not fused with it"),
            _BACKWARD,
        ),
        quantizer="NVFP4Quantizer", made_by="nvfp4_factory",
        entry="nvfp4", substitutes=("mxfp8", "blockwise", "tensorwise"), preference=4,
    ),
    Scaling(
        name="rowwise", words="FP8 with rowwise scaling", formats=("e4m3",), blocks=(_LINE, _LINE), stored=_TRAINING,
        hardware=_AO, sizes=Sizes(tokens=16, inner=16, outer=16, shard=1, expert=16, source=_SCALED_MM, shard_source=_SCALED_MM),
        emulation="torchao", recipes=(("0.13", "rowwise"),), core=None, substitutes=("tensorwise",), preference=6,
    ),
    Scaling(
        # its weight gradient is computed in high precision, so the number of tokens is free
        name="rowwise_gw_hp", words="FP8 with rowwise scaling and weight gradients in high precision", formats=("e4m3",), blocks=(_LINE, _LINE),
        high=("wgrad",), stored=_TRAINING, hardware=_AO,
        sizes=Sizes(tokens=1, inner=16, outer=16, shard=1, expert=1, source=_SCALED_MM, shard_source=_SCALED_MM),
        emulation="torchao", recipes=(("0.13", "rowwise_with_gw_hp"),), core=None, substitutes=("rowwise", "tensorwise"), preference=6,
    ),
    Scaling(
        name="custom", words="a custom FP8 recipe", formats=(*_FP8, "e2m1"), blocks=None, stored=StoredForm(tensor="a quantized tensor", both_copies=False),
        hardware=Hardware(low=(8, 9), engine="2.9", source=f"{_CHECKS} autocast_enter: a custom recipe needs FP8 support only"),
        sizes=Sizes(tokens=8, inner=16, outer=8, shard=1, expert=16, source=_BASE, shard_source=_SHARD),
        emulation=None, recipes=(("2.9", "CustomRecipe"),), core="custom", substitutes=("tensorwise",), preference=5,
    ),
)  # fmt: skip
