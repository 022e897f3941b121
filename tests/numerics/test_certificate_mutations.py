"""Each derivation has a test that notices a changed constant of what it describes: the constant is changed, and that test must fail."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpbridge.common.formats import DType
from mpbridge.planning import closed_forms
from tests.numerics import test_certificates as numerics
from tests.planning import test_certificates as planning

BF16, FP16, FP8 = DType.BF16, DType.FP16, DType.UINT8
KIND = {"kind": "normal", "chance": 0.0002}
OF_BF16 = ("common.formats", '"bfloat16": 7', '"bfloat16": 8')
OF_E4M3 = ("common.formats", "exponent=4, mantissa=3", "exponent=4, mantissa=2")

MUTATIONS: tuple[tuple[str, tuple[str, str, str], Any, Mapping[str, Any]], ...] = (
    # --- NVFP4: the block scale, the second level, the random bits, the grid, the transform, the block
    ("clipping", ("numerics.scales", "scale = round_nearest(wanted.clamp_max(FP32_LARGEST), E4M3)", "scale = round_nearest(wanted.clamp_max(FP32_LARGEST), E5M2)"), numerics.test_nvfp4_gradients_are_short_by_what_the_closed_form_says, KIND),
    ("clipping", ("numerics.scales", "wanted = torch.div(amax, torch.full_like(amax, E2M1.largest))", "wanted = torch.div(amax, torch.full_like(amax, 6.1))"), numerics.test_nvfp4_gradients_are_short_by_what_the_closed_form_says, KIND),
    ("operand_figures", ("numerics.scales", "wanted = torch.div(amax, torch.full_like(amax, E2M1.largest))", "wanted = torch.div(amax, torch.full_like(amax, 5.9))"), numerics.test_rounding_the_scale_up_removes_the_clipping, {"variant": None, "alignment": -0.00398, "floor": 6.62, "error": 18.83}),
    ("operand_figures", ("numerics.scales", "value + torch.exp2((exponent - E4M3.mantissa)", "value + torch.exp2((exponent - 2)"), numerics.test_rounding_the_scale_up_removes_the_clipping, {"variant": "scale-up", "alignment": -0.00072, "floor": 10.19, "error": 22.20}),
    ("nvfp4_second_pass", ("numerics.scales", "_quotient(bound * E2M1.largest, amax)", "_quotient(bound * 4.0, amax)"), numerics.test_nvfp4_blocks_vanish_on_the_second_pass_exactly_where_the_condition_holds, {}),
    ("stochastic_e2m1", ("numerics.codes", "random.to(torch.float32) * (1.0 / 256.0)", "random.to(torch.float32) * (1.0 / 255.0)"), numerics.test_stochastic_rounding_has_the_moments_of_its_256_outcomes, {}),
    ("stochastic_e2m1", ("numerics.codes", "units = torch.where(size >= 4, 0.5,", "units = torch.where(size >= 3, 0.5,"), numerics.test_stochastic_rounding_has_the_moments_of_its_256_outcomes, {}),
    ("stochastic_e2m1", ("numerics.codes", "size = y.abs().clamp_max(E2M1.largest)", "size = y.abs().clamp_max(5.75)"), numerics.test_stochastic_rounding_has_the_moments_of_its_256_outcomes, {}),
    ("Operands", ("numerics.quantizer", "found = self.quant.row.block(", "found = Block(across=1, along=32, scale='e4m3') if side != 'w' else self.quant.row.block("), numerics.test_an_expected_gradient_is_the_mean_of_a_second_implementation, {}),
    ("gemm_figures concentration", ("numerics.codes", "random.to(torch.float32) * (1.0 / 256.0)", "random.to(torch.float32) * (1.0 / 320.0)"), numerics.test_a_gemms_errors_are_those_of_draws, {}),
    ("gemm_figures", ("numerics.kernels", "* 0.25)", "* 0.26)"), numerics.test_a_gemms_errors_are_those_of_draws, {}),
    ("gain", ("numerics.kernels", "* 0.25)", "* 0.0 + torch.eye(16))"), numerics.test_outliers_pass_less_of_a_small_signal_unless_the_scale_is_rounded_up, {}),
    ("ms_eden", ("numerics.certificates.expected", "EDEN_BOUND = 128, 0.93, 256.0", "EDEN_BOUND = 128, 0.93, 448.0 * 2"), numerics.test_ms_eden_needs_redrawn_signs_to_average_out, {}),
    # --- FP8: the direction and the base of scales, ties, subnormals, the mantissa
    ("second_pass", ("numerics.scales", "exponent + up.to(torch.int32))", "exponent)"), numerics.test_powers_of_two_move_exactly_where_the_condition_holds, {"scaling": "mxfp8", "format_": "e4m3", "side": "x", "element": numerics.E4M3}),
    ("second_pass", ("numerics.scales", "1.0 / number.largest,", "1.0 / 512.0,"), numerics.test_powers_of_two_move_exactly_where_the_condition_holds, {"scaling": "mxfp8", "format_": "hybrid", "side": "dy", "element": numerics.E5M2}),
    ("second_pass", ("numerics.scales", "_EXPONENT_BITS = -8388608", "_EXPONENT_BITS = -4194304"), numerics.test_powers_of_two_move_exactly_where_the_condition_holds, {"scaling": "blockwise", "format_": "e4m3", "side": "x", "element": numerics.E4M3}),
    ("second_pass", ("numerics.codes", "anchor - (anchor - clamped)", "anchor - (anchor - clamped * (1 + 2.0**-20))"), numerics.test_powers_of_two_move_exactly_where_the_condition_holds, {"scaling": "mxfp8", "format_": "e4m3", "side": "x", "element": numerics.E4M3}),
    ("_conditions", ("numerics.kernels", "number.largest, power_of_two=power_of_two)\n    return round_nearest", "number.largest * 0.9, power_of_two=power_of_two)\n    return round_nearest"), numerics.test_fp32_scales_return_the_largest_code_as_itself, {}),
    ("relative_error bounds", ("numerics.codes", "_FP32_MANTISSA - number.mantissa)", "_FP32_MANTISSA - 2.0)"), numerics.test_a_normal_number_errs_by_at_most_the_bound_and_reaches_it, {"side": "x", "element": numerics.E4M3}),
    ("relative_error bounds", ("numerics.codes", "floor = smallest_normal(number)", "floor = 4 * smallest_normal(number)"), numerics.test_a_normal_number_errs_by_at_most_the_bound_and_reaches_it, {"side": "dy", "element": numerics.E5M2}),
    ("newton_schulz", ("numerics.optimizers", "A, B, C = 3.4445,", "A, B, C = 3.4444,"), numerics.test_newton_schulz_moves_singular_values_by_its_polynomial_and_errs_by_its_products, {}),
    ("newton_schulz", ("numerics.optimizers", "+ 0x1000) & -0x2000", "+ 0x2000) & -0x4000"), numerics.test_newton_schulz_moves_singular_values_by_its_polynomial_and_errs_by_its_products, {}),
    # --- the optimizer: what its dtypes hold
    ("lost_updates half_gap movement_kept ratio_of", OF_BF16, planning.test_lost_updates_are_those_that_a_cast_loses, {"kind": BF16, "lr": 1e-4, "sigma": 0.027}),
    ("lost_updates half_gap", ("common.formats", '"float16": 10', '"float16": 11'), planning.test_lost_updates_are_those_that_a_cast_loses, {"kind": FP16, "lr": 1e-5, "sigma": 0.027}),
    ("second_moment_stalls", OF_BF16, planning.test_second_moments_stand_still_as_often_as_casts_say, {"kind": BF16, "beta2": 0.99}),
    ("second_moment_stalls", OF_E4M3, planning.test_second_moments_stand_still_as_often_as_casts_say, {"kind": FP8, "beta2": 0.95}),
    ("first_moment_stalls", OF_BF16, planning.test_first_moments_stand_still_as_often_as_casts_say, {"kind": BF16}),
    ("second_moment_can_fall mantissa_of", OF_BF16, planning.test_a_second_moment_falls_without_gradients_or_never, {"beta2": 0.9981}),
    ("accumulation_bits mean_square_rounding", OF_BF16, planning.test_sums_of_micro_batches_lose_the_predicted_bits, {"count": 64}),
    ("accumulation_stops_at", OF_BF16, planning.test_equal_gradients_stop_adding_up_at_the_predicted_number, {}),
    ("flush_ratio", ("backend.engines.optimizers", "torch.uint8: 448.0", "torch.uint8: 440.0"), planning.test_a_second_moment_below_the_ratio_is_flushed_and_above_it_is_not, {"kind": FP8}),
    ("flush_ratio", ("backend.engines.optimizers", "torch.finfo(torch.float16).max / 2.0", "torch.finfo(torch.float16).max / 1.0"), planning.test_a_second_moment_below_the_ratio_is_flushed_and_above_it_is_not, {"kind": FP16}),
    ("rate_for warning", OF_BF16, planning.test_only_a_run_that_loses_updates_is_told_so, {}),
)  # fmt: skip
"""Derivations, what is changed (module, text, instead of it), the test and its arguments."""


@contextlib.contextmanager
def mutated(name: str, old: str, new: str) -> Iterator[None]:
    """The module with one text replaced: functions get the code, and constants the values, that the changed source gives them; both are restored."""
    module = importlib.import_module(f"mpbridge.{name}")
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    other = types.ModuleType(module.__name__)
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), other.__dict__)
    undo = list(exchanged(module, other))
    try:
        assert undo, f"replacing {old!r} in {name} changes nothing"
        yield
    finally:
        for restore in reversed(undo):
            restore()


def exchanged(at: Any, other: Any) -> Iterator[Any]:
    """Exchanges what differs between a module, or a class, and its changed twin; yields what undoes each exchange."""
    for name, mine in list(vars(at).items()):
        its = vars(other).get(name)
        if getattr(mine, "__module__", at.__name__) not in (at.__name__, getattr(at, "__module__", None)):
            continue
        if isinstance(mine, type):
            if isinstance(its, type):
                yield from exchanged(mine, its)
            continue
        if dataclasses.is_dataclass(mine):
            for field in dataclasses.fields(mine):
                if (value := getattr(mine, field.name)) != (changed := getattr(its, field.name)):
                    object.__setattr__(mine, field.name, changed)
                    yield lambda mine=mine, field=field, value=value: object.__setattr__(mine, field.name, value)
            continue
        call, twin = (inspect.unwrap(getattr(one, "fget", one)) for one in (mine, its))  # type: ignore[arg-type]
        if isinstance(call, types.FunctionType):
            if isinstance(twin, types.FunctionType) and (code := call.__code__) != twin.__code__:
                forget = getattr(mine, "cache_clear", lambda: None)
                forget()
                call.__code__ = twin.__code__
                yield lambda call=call, code=code, forget=forget: (setattr(call, "__code__", code), forget())
        elif (
            isinstance(mine, (int, float, tuple, dict))
            and "<function" not in repr(mine)
            and not name.startswith("__")
            and repr(mine) != repr(its)
        ):
            setattr(at, name, its)
            yield lambda name=name, mine=mine: setattr(at, name, mine)


@pytest.mark.parametrize(
    ("change", "test", "arguments"),
    [pytest.param(*row, id=f"{of.split()[0]}-{row[0][2][-24:]}") for of, *row in MUTATIONS],
)
def test_a_changed_constant_is_noticed(change: tuple[str, str, str], test: Any, arguments: Mapping[str, Any]) -> None:
    with mutated(*change), pytest.raises(AssertionError):
        test(**arguments)


def test_a_change_is_undone() -> None:
    for change in dict.fromkeys(change for _, change, *_ in MUTATIONS):
        with mutated(*change):
            pass
    for module in {change[0] for _, change, *_ in MUTATIONS}:
        with (
            pytest.raises(AssertionError, match="changes nothing"),
            mutated(module, "from __future__ import annotations\n", "from __future__ import annotations\n"),
        ):
            pass


def test_every_derivation_is_in_the_table() -> None:
    covered = {name for of, *_ in MUTATIONS for name in of.split()}
    public = {
        name
        for name, value in vars(closed_forms).items()
        if inspect.isfunction(value) and value.__module__ == closed_forms.__name__ and not name.startswith("_")
    }
    assert public <= covered
    assert Path(numerics.__file__).name in {Path(inspect.getfile(test)).name for _, _, test, _ in MUTATIONS}
