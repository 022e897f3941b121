"""What a difference costs: bytes kept, bytes sent, bits of mantissa; the rows add up to the bytes per parameter."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from mpbridge import recipes
from mpbridge.interop.stacks.exporters import STACKS, export
from mpbridge.interop.stacks.meaning import Meaning, differences, of_policy
from mpbridge.interop.stacks.reasons import cost
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

KEPT = ("storage", "main", "accumulator", "optimizer_reads", "exp_avg", "exp_avg_sq")


def meaning(name: str) -> Meaning:
    return of_policy(resolve(get_mixed_precision_config(name)))


def per_parameter(text: str) -> int:
    found = re.search(r"(\d+) bytes? per parameter (more|fewer)", text)
    return 0 if found is None else int(found[1]) * (1 if found[2] == "more" else -1)


def test_the_rows_add_up_to_the_bytes_per_parameter() -> None:
    meanings = {name: meaning(name) for name in recipes}
    for one, other in itertools.permutations(meanings, 2):
        a, b = meanings[one], meanings[other]
        rows = [row for row in differences(a, b) if row in KEPT]
        assert sum(per_parameter(cost(row, a, b)) for row in rows) == sum(b.bytes) - sum(a.bytes), (one, other)


def test_the_wire_says_its_volume_and_a_narrower_dtype_the_bits_it_loses() -> None:
    wide, low = meaning("bf16_mixed"), meaning("fp16_mixed")
    assert cost("wire", wide, low) == "half the bytes of gradients on the wire, 13 bits of mantissa fewer"
    assert cost("wire", low, wide) == "twice the bytes of gradients on the wire"
    # two bytes of the accumulator are saved, and the optimizer reads a copy in FP32
    assert cost("accumulator", wide, low).startswith("2 bytes per parameter more with the optimizer's copy")
    assert cost("compute", low, wide) == "3 bits of mantissa fewer"


def test_quantized_linears_say_bits_and_bytes() -> None:
    plain, low = meaning("bf16_mixed"), meaning("bf16_with_mxfp8_mixed")
    assert cost("quantization", plain, low) == "operands of 8 bits instead of 16, 1 byte per quantized weight fewer"
    assert cost("quantization", plain, meaning("bf16_with_nvfp4_mixed")) == "operands of 4 bits instead of 16"


@pytest.mark.parametrize("stack", STACKS)
def test_every_difference_in_a_dtype_has_its_cost(stack: str) -> None:
    lines = [line for name in recipes for line in export(name, stack).lines if line.fidelity == "different"]
    told = [line for line in lines if line.fact in {*KEPT, "wire", "compute"}]
    assert [str(line) for line in told if not re.search(r"bytes|bits? of mantissa", line.text)] == []


def test_compare_shows_what_the_second_costs(cli) -> None:
    assert "half the bytes of gradients on the wire" in cli("compare", "bf16_mixed", "fp16_mixed")
    assert json.loads(cli("compare", "bf16_mixed", "fp16_mixed", "--json"))["costs"]["wire"].startswith("half")


@pytest.mark.parametrize("stack", ["torchtitan", "fsdp2", "automodel", "accelerate", "lightning", "transformers"])
def test_the_same_arithmetic_from_other_weights_is_said_where_no_copy_is_kept(stack: str) -> None:
    mixed, own = (export(name, stack).lines for name in ("bf16_mixed", "fp32_params_bf16_compute"))
    (text,) = (line.text for line in mixed if line.fact == "main")
    assert "start from FP32 values, not from values rounded" in text
    assert not [line for line in own if line.fact == "main"]
