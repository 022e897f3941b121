"""Public bugs of serving as things that can be planted in a folder: the rows of docs/serving.md's table, each of which a test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.training.serving import models

Held = dict[str, torch.Tensor]
Plant = Callable[[Held, Any], None]
L0 = "model.layers.0."
CT, MO = "compressed-tensors", "modelopt"


class Bug(NamedTuple):
    """One row."""

    threads: str
    """Public threads, 'owner/name#number', commas between."""
    planted: str
    method: str
    scaling: str
    plant: Plant
    where: str
    said: str
    """What `contract` says there."""
    model: str = "llama"
    """Of `models.checkpoints`."""
    target: str | None = None


def ct(held: Held, weight: torch.Tensor, module: str) -> None:
    """NVFP4 of one linear by itself, in blocks of a row, with multiplications by reciprocals as training does."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    overall = 2688.0 / weight.abs().max()
    peaks = weight.view(weight.shape[0], -1, 16).abs().amax(-1)
    block = (peaks / 6 * overall).to(torch.float8_e4m3fn)
    scaled = weight.view(weight.shape[0], -1, 16) * (1 / (block.float() * (1 / overall))).clamp_max(3e38).unsqueeze(-1)
    near = (scaled.abs().clamp_max(6).unsqueeze(-1) - grid).abs()
    code = torch.where(near == near.amin(-1, keepdim=True), torch.arange(8) % 2 * 10 + torch.arange(8), 99).argmin(-1)
    code = (code + 8 * torch.signbit(scaled)).view(weight.shape[0], -1).to(torch.uint8)
    held[f"{module}.weight_packed"] = code[:, ::2] | code[:, 1::2] << 4
    held[f"{module}.weight_scale"] = block
    held[f"{module}.weight_global_scale"] = overall.reshape(1)


def original(name: str) -> torch.Tensor:
    return models.weights()[f"{name}.weight"].float()


# --- what is planted: (held, config) is changed in place ----------------------------------------------------------------------------------
def one_dimensional(held: Held, config: Any) -> None:
    ct(held, original(f"{L0}mlp.down_proj"), f"{L0}mlp.down_proj")


def apart(held: Held, config: Any) -> None:
    for part in ("gate", "up"):
        module = f"{L0}mlp.{part}_proj"
        ct(held, original(module), module)


def divided(held: Held, config: Any) -> None:
    weight, name = original("model.layers.1.mlp.down_proj"), "model.layers.1.mlp.down_proj"
    scale = weight.abs().max() / 448
    held[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale"] = scale.expand(256, 1).clone()


def in_bf16(held: Held, config: Any) -> None:
    weight, name = original("model.layers.1.mlp.down_proj").bfloat16(), "model.layers.1.mlp.down_proj"
    scale = (weight.abs().max().float() / 448).bfloat16()
    held[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale"] = scale.expand(256, 1).clone()


def fp32_blocks(held: Held, config: Any) -> None:
    name = f"{L0}self_attn.o_proj"
    blocks = original(name).view(2, 128, 2, 128)
    scale = torch.full((2, 2), 448.0) / blocks.abs().amax((1, 3))
    held[f"{name}.weight"] = (blocks * scale[:, None, :, None]).view(256, 256).to(torch.float8_e4m3fn)
    held[f"{name}.weight_scale_inv"] = 1 / scale


def floor_rule(held: Held, config: Any) -> None:
    name = f"{L0}self_attn.o_proj"
    blocks = original(name).view(256, 8, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    held[f"{name}.weight"] = (
        (blocks / torch.exp2(exponent).unsqueeze(-1)).clamp(-448, 448).view(256, 256).to(torch.float8_e4m3fn)
    )
    held[f"{name}.weight_scale"] = (exponent + 127).to(torch.uint8)


def rounded_up(held: Held, config: Any) -> None:
    for name in [name for name in held if name.endswith("weight_scale")]:
        held[name] = torch.exp2(torch.ceil(torch.log2(held[name])))


def multiplied(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Held, Any], None]:
    def plant(held: Held, config: Any) -> None:
        held[name] = change(held[name])

    return plant


def dropped(name: str) -> Callable[[Held, Any], None]:
    return lambda held, config: held.__delitem__(name)


def swapped(held: Held, config: Any) -> None:
    a, b = f"{L0}mlp.gate_proj.weight_scale", f"{L0}mlp.up_proj.weight_scale"
    held[a], held[b] = held[b], held[a]


def in_high_precision(held: Held, config: Any) -> None:
    name = f"{L0}mlp.down_proj.weight"
    del held[f"{name}_scale"]
    held[name] = models.weights()[name]


def fp8_in_nvfp4(held: Held, config: Any) -> None:
    name = f"{L0}mlp.down_proj"
    held[f"{name}.weight"] = original(name).to(torch.float8_e4m3fn)


def listing(*entries: str, key: str = "ignore", drop: str = "") -> Callable[[Held, Any], None]:
    def plant(held: Held, config: Any) -> None:
        listed = config["quantization_config"][key]
        config["quantization_config"][key] = [name for name in listed if name != drop] + list(entries)

    return plant


def kept_apart(held: Held, config: Any) -> None:
    """The trainer's regular expression for the router also kept gate_proj, and the export follows it."""
    name = f"{L0}mlp.gate_proj"
    del held[f"{name}.weight_scale"]
    held[f"{name}.weight"] = models.weights()[f"{name}.weight"]
    config["quantization_config"]["ignore"].append("re:.*mlp.gate.")


def mx(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 by its definition: (codes, E8M0 bytes), exponents rounded up."""
    blocks = weight.view(weight.shape[0], -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).double() / 448)).float()
    codes = (blocks / torch.exp2(exponent).unsqueeze(-1)).view(weight.shape).to(torch.float8_e4m3fn)
    return codes, (exponent + 127).to(torch.uint8)


def quantized_too(name: str, listed: bool) -> Plant:
    def plant(held: Held, config: Any) -> None:
        held[f"{name}.weight"], held[f"{name}.weight_scale"] = mx(original(name))
        names = config["quantization_config"]["ignore"]
        config["quantization_config"]["ignore"] = [one for one in names if listed or one != name]

    return plant


def kept_layer_quantized(held: Held, config: Any) -> None:
    name = f"{L0}self_attn.o_proj"
    weight = original(name)
    scale = weight.abs().amax(1, keepdim=True) / 448
    held[f"{name}.weight"], held[f"{name}.weight_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
    names = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [one for one in names if one != name]


def requantized(held: Held, config: Any) -> None:
    """As engines do for DeepGEMM: the folder's values, not the weights, to the next power of two."""
    for name in [name.removesuffix("_scale_inv") for name in held if name.endswith("_scale_inv")]:
        scales = held[f"{name}_scale_inv"]
        wide = held[name].float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        blocks = wide.view(scales.shape[0], 128, scales.shape[1], 128)
        power = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)))
        held[name] = (blocks / power[:, None, :, None]).view(wide.shape).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = power


def fp32_scales(held: Held, config: Any) -> None:
    held[f"{L0}self_attn.o_proj.weight_scale"] *= 1.5


def from_main(held: Held, config: Any) -> None:
    name = f"{L0}mlp.down_proj"
    held[f"{name}.weight"], held[f"{name}.weight_scale"] = mx(models.main_weight())


def added(name: str) -> Plant:
    return lambda held, config: held.update({name: torch.zeros(2, 2)})


def nothing(held: Held, config: Any) -> None:
    pass


V, S, M = "vllm-project/vllm", "sgl-project/sglang", "NVIDIA/Model-Optimizer"
BUGS: tuple[Bug, ...] = (
    Bug(f"{V}#46400", "codes by division by amax / 448", CT, "tensorwise", divided, "layers.1.mlp.down_proj", "division by amax / 448"),
    Bug(f"{V}#46400", "scale and quotient in BF16", CT, "tensorwise", in_bf16, "layers.1.mlp.down_proj", "scale and quotient computed in BF16"),
    Bug(f"{V}#46400", "MX exponents rounded down", CT, "mxfp8", floor_rule, "layers.0.self_attn.o_proj", "exponents rounded down (the floor rule of OCP MX)"),
    Bug("verl-project/verl#7918, verl-project/verl#7519", "entry `model.layers.0.mlp.gate`", MO, "mxfp8", listing("model.layers.0.mlp.gate"), "mlp.gate_up_proj",
        "vllm keeps it in high precision (by the entry 'model.layers.0.mlp.gate')"),
    Bug("PrimeIntellect-ai/prime-rl#2442", "gate_proj in BF16, kept by `mlp.gate.`", CT, "mxfp8", kept_apart, "layers.0.mlp.gate_proj",
        "trained in MXFP8, served in high precision"),
    Bug(f"{V}#21669, {V}#44628", "entry `o_proj`", "fp8", "blockwise", listing("o_proj", key="modules_to_not_convert"), "o_proj", "matches no module of the folder"),
    Bug(f"{S}#30598", "a linear quantized that the recipe keeps, and not listed", CT, "tensorwise", kept_layer_quantized, "layers.0.self_attn.o_proj",
        "stored quantized; training kept it in high precision"),
    Bug("NVIDIA-NeMo/RL#3652", "output layer in MXFP8, and not listed", MO, "mxfp8", quantized_too("lm_head", listed=False), "lm_head",
        "stored quantized; training kept it in high precision"),
    Bug(f"{M}#1858", "router missing from the list", MO, "mxfp8", listing(drop="model.layers.0.mlp.gate"), "layers.0.mlp.gate",
        "is stored in high precision, and not listed", "qwen3"),
    Bug(f"{V}#45102, {V}#45132", "output layer in MXFP8, and listed", MO, "mxfp8", quantized_too("lm_head", listed=True), "lm_head",
        "is stored quantized, and listed as in high precision"),
    Bug(f"{M}#2055, {M}#2112", "untied output layer in BF16, and not listed", MO, "mxfp8", listing(drop="lm_head"), "lm_head",
        "is stored in high precision, and not listed"),
    Bug(f"{M}#1411, {M}#1033, {V}#54974, {V}#54150", "gate and up scaled apart", CT, "nvfp4", apart, "layers.0.mlp.gate_proj",
        "scales of the tensor differ among fused linears"),
    Bug("", "NVFP4 in blocks of one row", CT, "nvfp4", one_dimensional, "layers.0.mlp.down_proj", "1-D blocks of 16 instead of 16 x 16"),
    Bug(f"{V}#45212", "a scale is NaN", MO, "nvfp4", multiplied(f"{L0}mlp.up_proj.weight_scale_2", lambda t: t * float("nan")), "up_proj.weight_scale_2",
        "has values that are not finite"),
    Bug(f"{V}#45212", "a scale is missing", CT, "mxfp8", dropped(f"{L0}mlp.up_proj.weight_scale"), "up_proj.weight_scale", "is missing"),
    Bug(f"{V}#54189", "scales are zero", CT, "tensorwise", multiplied("model.layers.1.mlp.up_proj.weight_scale", lambda t: t * 0), "up_proj.weight_scale",
        "has values of 0, expected positive ones"),
    Bug("huggingface/transformers#48371, huggingface/transformers#48372", "no second-level scale", CT, "nvfp4", dropped(f"{L0}mlp.down_proj.weight_global_scale"),
        "weight_global_scale", "is missing"),
    Bug("modular/modular#6600", "a divisor stored as a multiplier", CT, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight_global_scale", lambda t: 1 / t),
        "mlp.down_proj", "divisor and multiplier are confused"),
    Bug("", "a multiplier stored as a divisor", MO, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight_scale_2", lambda t: 1 / t), "mlp.down_proj",
        "divisor and multiplier are confused"),
    Bug("huggingface/transformers#47030", "scales rounded up, codes as they were", CT, "tensorwise", rounded_up, "layers.1.",
        "rounded up to powers of two after the cast"),
    Bug(f"{S}#28662, {V}#22399, {S}#12878", "FP32 block scales, `--target b200`", CT, "blockwise", fp32_scales, "weight_scale",
        "are FP32 numbers, and B200 multiplies with powers of two", target="b200"),
    Bug(f"{V}#38083", "blocks quantized again to powers of two", "fp8", "fp32 blocks", requantized, "layers.0.self_attn.o_proj",
        "the codes quantized a second time, to power-of-two scales"),
    Bug("PrimeIntellect-ai/prime-rl#3112", "powers of two on one side only", "fp8", "blockwise", fp32_blocks, "layers.0.self_attn.o_proj",
        "FP32 scales instead of powers of two"),
    Bug("InternLM/xtuner#2044", "cast from the FP32 main weights", CT, "mxfp8", from_main, "layers.0.mlp.down_proj",
        "cast from the FP32 main weight instead of the parameter", "trained"),
    Bug("NVIDIA-NeMo/Megatron-Bridge#5757", "blockwise, heads of 64 rows", "fp8", "blockwise", nothing, "fp8 FP8",
        "blocks of 128 rows span query, key and value at heads of 64 rows", "heads of 64"),
    Bug(f"{M}#868", "FP8 in an NVFP4 folder", MO, "nvfp4", fp8_in_nvfp4, "down_proj.weight", "is [256, 384], expected [256, 192]"),
    Bug(f"{M}#2160, {M}#2038", "block scales of half the width", MO, "nvfp4",
        multiplied(f"{L0}mlp.down_proj.weight_scale", lambda t: t[:, : t.shape[1] // 2].contiguous()), "weight_scale", "is [256, 12], expected [256, 24]"),
    Bug("NVIDIA-NeMo/Megatron-Bridge#1746, NVIDIA-NeMo/Megatron-Bridge#1075, NVIDIA-NeMo/Megatron-Bridge#2058", "a linear in BF16", MO, "mxfp8", in_high_precision,
        "layers.0.mlp.down_proj", "trained in MXFP8, served in high precision"),
    Bug(f"{M}#2334", "experts in one packed tensor", MO, "mxfp8", added(f"{L0}mlp.experts.w13"), "experts.w13", "is not part of the run's model"),
    Bug("", "the two codes of a byte swapped", MO, "nvfp4", multiplied(f"{L0}mlp.down_proj.weight", lambda t: t >> 4 | t << 4), "mlp.down_proj",
        "two codes of each byte are swapped"),
    Bug("", "scales of gate and up interchanged", CT, "mxfp8", swapped, "layers.0.mlp.gate_proj", "scales of the fused linears are interchanged"),
    Bug("", "q_proj alone listed", CT, "mxfp8", listing(f"{L0}self_attn.q_proj"), "self_attn.qkv_proj", "vllm refuses it: q_proj of it is listed, the rest is not"),
    Bug("", "another norm", CT, "mxfp8", multiplied(f"{L0}input_layernorm.weight", lambda t: t + 1), "input_layernorm", "has other values than the run"),
)  # fmt: skip
"""Rows without a thread are mistakes of the same kinds that no thread reports."""
