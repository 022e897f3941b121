"""Number formats, from the formula; and words for dtypes."""

from __future__ import annotations

import pytest
import torch

from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.common.formats import FORMATS, DType, dtype, say


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_and_smallest_values_follow_from_the_bits(name: str) -> None:
    f = FORMATS[name]
    codes = 2**f.exponent - 1
    if f.name == "e8m0":  # only exponents; the top code is NaN, the lowest is no subnormal
        expected = (2.0 ** (codes - 1 - f.bias), 2.0**-f.bias)
    else:
        # e5m2 gives its top exponent to infinities, e4m3 only the top mantissa to NaN, e2m1 nothing
        top = codes - 1 if f.name == "e5m2" else codes
        steps = 2**f.mantissa - 1 - (1 if f.name == "e4m3" else 0)
        expected = (2.0 ** (top - f.bias) * (1 + steps / 2**f.mantissa), 2.0 ** (1 - f.bias - f.mantissa))
    assert (f.largest, f.smallest) == expected
    assert f.bits == {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e8m0": 8}[name]


@pytest.mark.parametrize(("name", "theirs"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_torch_has_the_same_limits(name: str, theirs: torch.dtype) -> None:
    info = torch.finfo(theirs)
    assert FORMATS[name].largest == info.max
    assert FORMATS[name].smallest == info.smallest_normal * 2.0 ** -FORMATS[name].mantissa


@pytest.mark.parametrize("member", DType)
def test_a_dtype_knows_its_name_bytes_and_torchs(member: DType) -> None:
    assert member.torch().itemsize == member.bytes
    for spelling in (member, member.value, member.short, f"torch.{member.value}", member.torch(), member.value.upper()):
        assert dtype(spelling) is member


@pytest.mark.parametrize(
    ("word", "member"),
    [("half", DType.FP16), ("single", DType.FP32), ("double", DType.FP64), ("fp8", DType.UINT8), ("32", DType.FP32)],
)
def test_words_that_people_use(word: str, member: DType) -> None:
    assert dtype(word) is member


@pytest.mark.parametrize("wrong", ["b16", "", None, 16.5, "torch.float8_e4m3fn", True])
def test_what_is_no_dtype_is_refused_with_the_legal_words(wrong: object) -> None:
    with pytest.raises(BadValue, match=r"is not a dtype .expected one of fp64, fp32, bf16"):
        dtype(wrong)


def test_values_are_shown_as_people_write_them() -> None:
    values = (None, True, 2.0**32, 65536, 1000, torch.bfloat16, DType.FP16, "e4m3", dtype)
    assert " ".join(map(say, values)) == "none true 2**32 2**16 1000 bf16 fp16 e4m3 dtype"


def test_an_unknown_name_is_found_word_by_word_and_survives_a_pickle() -> None:
    import pickle

    error = UnknownName("recipe", "BF16-mixd", ["bf16_mixed", "fp16_mixed", "fp32"])
    assert error.near[0] == "bf16_mixed"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.near, again.exit_code) == (str(error), error.near, 2)
