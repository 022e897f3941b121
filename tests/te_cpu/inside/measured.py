"""Statistics of runs whose weights rest in FP8, against what the codes and scales of Transformer Engine's tensors say, read by torch's own FP8 dtypes."""

import math

import pytest
import torch

from mpbridge import pretrain
from mpbridge.observe.telemetry.records import read
from mpbridge.training.base import Hook
from mpbridge.training.certified import own_tensors
from tests.te_cpu.two_ranks import DELAYED, MXFP8, OVERLAP, TENSORWISE, WHOLE

from .training import BLACKWELL, tiny

LAST = 4
RECIPES = {"mxfp8": (MXFP8, *OVERLAP)} if BLACKWELL else {"delayed": (DELAYED,), "tensorwise": (TENSORWISE, WHOLE)}
GEMMS = {
    ("w", "row"): "fprop", ("w", "column"): "dgrad", ("x", "row"): "fprop",
    ("x", "column"): "wgrad", ("dy", "row"): "dgrad", ("dy", "column"): "wgrad",
} if BLACKWELL else {("w", "row"): "fprop+dgrad", ("x", "row"): "fprop+wgrad", ("dy", "row"): "dgrad+wgrad"}  # fmt: skip
"""On a Hopper a tensor has one scale and so one set of values, whichever of its two copies a GEMM reads."""
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
NORMED = ("self_attention.linear_qkv", "mlp.linear_fc1")
"""They quantize the result of the norm that they hold."""


class Caught(Hook):
    """What each linear gets in the first micro-batch of the last step, and the weight that it has there."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        self.scales: dict[tuple[str, str], torch.Tensor] = {}
        self.weights: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.classes: set[str] = set()

    def stepping(self, training) -> None:
        if training.counters.iteration + 1 == LAST:
            for name, module in training.engine.model[0].named_modules():
                if name.endswith(LINEARS):
                    path = name[name.index("decoder") :]
                    module.register_forward_pre_hook(lambda module, args, path=path: self.enters(path, module, args))
                    module.register_forward_hook(lambda module, args, out, path=path: self.leaves(path, module, out))

    def enters(self, path, module, args) -> None:
        if (path, "x") not in self.tensors:
            self.tensors[path, "x"] = args[0].detach().clone().reshape(-1, args[0].shape[-1])
            self.classes.add(type(module.weight).__name__)
            self.weights[path] = held(module.weight)
            if "delayed" in RECIPES and module.fp8_meta["recipe"].delayed():
                self.scales[path, "x"] = module.fp8_meta["scaling_fwd"].scale[0].clone()

    def leaves(self, path, module, out) -> None:
        def gradient(dy) -> None:
            if (path, "dy") not in self.tensors:
                self.tensors[path, "dy"] = dy.detach().clone().reshape(-1, dy.shape[-1])
                if (path, "x") in self.scales:
                    self.scales[path, "dy"] = module.fp8_meta["scaling_bwd"].scale[0].clone()

        out[0].register_hook(gradient)


def held(weight):
    """(values, scales) of a weight's row copy and of its column copy: the codes, as torch reads them, times the stored factors."""
    rows, columns = weight.shape
    if not BLACKWELL:
        values = weight._data.view(torch.float8_e4m3fn).float() * weight._scale_inv
        return values, 1 / weight._scale_inv, values, 1 / weight._scale_inv
    made = []
    for data, stored, axis in ((weight._rowwise_data, weight._rowwise_scale_inv, 1), (weight._columnwise_data, weight._columnwise_scale_inv, 0)):  # fmt: skip
        blocks = stored[: rows if axis else rows // 32, : columns // 32 if axis else columns]
        factor = torch.exp2(blocks.float() - 127)
        made += [data.view(torch.float8_e4m3fn).float() * factor.repeat_interleave(32, axis), 1 / factor]
    return tuple(made)


def rounded(x, side: str, copy: str, scale):
    """(what the cast leaves of a tensor, its scale); scale: None where it follows the amax."""
    wide = x.float()
    if BLACKWELL:
        blocks = wide.unflatten(1, (-1, 32)) if copy == "row" else wide.unflatten(0, (-1, 32))
        axis = 2 if copy == "row" else 1
        peak = blocks.abs().amax(axis, keepdim=True).double()
        factor = torch.exp2(torch.ceil(torch.log2(peak / 448)).clamp(min=-127))
        low = ((blocks / factor).float().to(torch.float8_e4m3fn).double() * factor).reshape(wide.shape)
        return low, 1 / factor
    number = torch.float8_e5m2 if side == "dy" else torch.float8_e4m3fn
    largest = torch.finfo(number).max
    scale = largest / wide.abs().amax() if scale is None else scale
    return (wide * scale).clamp(-largest, largest).to(number).double() / scale.double(), scale


def middle(values) -> float:
    """The lower one of two in the middle, of factors that are stored inverted."""
    return 1 / float((1 / values.double()).median())


def close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=2e-4, abs_tol=1e-9)


@pytest.mark.parametrize("scaling", RECIPES)
def test_statistics_of_a_run_with_weights_at_rest_say_what_its_tensors_hold(tmp_path, scaling) -> None:
    recipe, *overrides = RECIPES[scaling]
    caught = Caught()
    more = ("mixed_precision.fp8_param_gather=true", f"train.train_iters={LAST}", f"logger.precision_every={LAST}", f"logger.log_dir={tmp_path}", "model.max_sequence_length=64", "data.seq_length=64", "train.micro_batch_size=1")  # fmt: skip
    pretrain(tiny(recipe, *more, *overrides), hooks=[caught], quiet=True)
    assert caught.classes == {"MXFP8Tensor" if BLACKWELL else "Float8Tensor"}
    found = read(tmp_path)
    (one,), faults = found.measured, found.faults
    assert faults == []
    assert (one.step, one.facts["realization"]) == (LAST, "native")
    rows = {(row["linear"], row["side"], row["copy"]): row for row in one.tables["operands"]}
    paths = [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in LINEARS]
    assert {key: row["gemms"] for key, row in rows.items()} == {(path, *place): gemms for path in paths for place, gemms in GEMMS.items()}  # fmt: skip
    wrong = []
    for (path, side, copy), row in rows.items():
        assert (row["scaling"], row["nonfinite"]) == (scaling, 0)
        if side == "w":
            values, scales = caught.weights[path][:2] if copy == "row" else caught.weights[path][2:]
            expected = {"amax": float(values.abs().max()), "scale": middle(scales)}
            assert row["sqnr"] is None  # what it was cast from are main weights that lie elsewhere
        elif side == "x" and path.endswith(NORMED):
            continue
        else:
            x = caught.tensors[path, side]
            low, scales = rounded(x, side, copy, caught.scales.get((path, side)))
            expected = compared(x.double(), low) | {"scale": middle(scales)}
        wrong += [(path, side, copy, name, row[name], value) for name, value in expected.items() if not close(row[name], value)]  # fmt: skip
    assert wrong == []
    assert {row["linear"] for row in one.tables["linears"] if row["grad_to_noise"]} >= set(paths)


@pytest.mark.parametrize("scaling", [name for name in RECIPES if name != "tensorwise"])
def test_operands_of_weights_in_high_precision_are_measured_and_can_be_certified(tmp_path, scaling) -> None:
    more = ("mixed_precision.fp8_param_gather=false", f"train.train_iters={LAST}", f"logger.precision_every={LAST}", f"logger.log_dir={tmp_path}", "model.max_sequence_length=64", "data.seq_length=64")  # fmt: skip
    more += ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false",) if BLACKWELL else ()
    pretrain(tiny(RECIPES[scaling][0], *more), quiet=True)
    found = read(tmp_path)
    (one,), faults = found.measured, found.faults
    assert faults == []
    rows = one.tables["operands"]
    assert {gemm for row in rows for gemm in row["gemms"].split("+")} == {"fprop", "dgrad", "wgrad"}
    assert {row["scaling"] for row in rows} == {scaling}
    # what E4M3 costs a tensor that fits its scale: about 32 dB
    compared = [row["sqnr"] for row in rows if row["sqnr"] is not None and row["format"] == "e4m3"]
    assert len(compared) >= 8
    assert all(25 < noise < 40 for noise in compared)
    assert all((row["staleness"] is not None) == (scaling == "delayed") for row in rows)
    assert any(row["grad_to_noise"] is not None for row in one.tables["linears"])
    own = own_tensors(tmp_path)
    # the input of a linear with a fused norm is what the norm made of it
    x = own.linears["decoder.layers.1.self_attention.linear_qkv"].x
    assert float(x.square().mean().sqrt()) == pytest.approx(1, abs=0.1)
    assert {row.tensor for row in own.rows} >= {"yours: decoder.layers.1.self_attention.linear_qkv"}


def compared(x, low) -> dict[str, float]:
    """What a row of statistics says of a tensor and what the cast leaves of it."""
    noise, signal = (low - x).square(), x.square()
    return {
        "amax": float(x.abs().max()),
        "flushed": float(((x != 0) & (low == 0)).sum() / (x != 0).sum()),
        "sqnr": 10 * math.log10(float(signal.sum() / noise.sum())),
    }
