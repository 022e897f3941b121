"""Imports of launch scripts and checkpoints, and input that is not what it claims to be."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import BadValue, DataError, MpbridgeError
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.exporters import STACKS
from mpbridge.interop.stacks.importers import read_file, read_text
from mpbridge.interop.stacks.nearest import answer

FP32, BF16, FP16 = DType.FP32, DType.BF16, DType.FP16


def told(found: Imported) -> str:
    return str(answer(found.fields, engine=found.engine, meaning=found.meaning))


def test_a_launch_script_is_read_with_its_arrays_and_variables_and_says_what_a_branch_decides() -> None:
    script = """#!/bin/bash
# --fp16 in a comment is none
DTYPE=${DTYPE:-fp8}
ARGS=(
    --bf16   # the base
    --grad-reduce-in-bf16
)
FP8=( "--fp8-format hybrid" --fp8-recipe $RECIPE )
if [[ "$DTYPE" == "fp16" ]]; then
    ARGS+=( --fp16 )
fi
echo --fp16 > $(touch DANGER)
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    ${ARGS[@]} ${FP8[@]} --lr 1e-4
"""
    found = read_text(script, name="train.sh", env={"RECIPE": "tensorwise"})
    assert told(found).startswith("bf16_with_fp8_current_scaling_mixed")
    assert found.meaning.wire is BF16
    assert not Path("DANGER").exists()
    said = "--fp16 stands in `if` of line 9, which is not followed: not decided"
    assert any(said in line for line in found.undecided)
    whole = read_text(script.replace("${FP8[@]}", '"${FP8[@]}"'), name="train.sh", env={"RECIPE": "x"})
    assert any("one word" in line for line in whole.unknown)


def test_arguments_of_a_checkpoint_are_read_without_unpickling(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        bf16=True, fp8="hybrid", fp8_recipe="tensorwise", accumulate_allreduce_grads_in_fp32=True, hysteresis=2, params_dtype=torch.bfloat16,
        use_precision_aware_optimizer=True, exp_avg_dtype=torch.uint8, main_params_dtype=torch.float32, weights=torch.ones(3),
    )  # fmt: skip
    torch.save({"args": arguments, "iteration": 3}, tmp_path / "common.pt")
    seen: list[str] = []
    sys.addaudithook(lambda event, _: seen.append(event) if event == "pickle.find_class" else None)
    found = read_file(tmp_path)
    assert found.fields["fp8_recipe"] == "tensorwise"
    assert found.fields["exp_avg_dtype"] == "fp8"
    assert not found.inert
    assert seen == []


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PAYLOAD_RAN",)


def test_a_payload_in_a_checkpoint_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": argparse.Namespace(bf16=True, evil=_Payload()), "x": _Payload()}, tmp_path / "common.pt")
    assert read_file(tmp_path / "common.pt").fields["bf16"] is True
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(_Payload()))
    with pytest.raises(DataError, match="has no 'args'"):
        read_file(tmp_path / "plain.pt")
    assert not (tmp_path / "PAYLOAD_RAN").exists()


def test_a_broken_checkpoint_is_one_readable_error(tmp_path: Path) -> None:
    for content in (b"", b"\x80", b"PK\x03\x04broken", b"(" * 1000, b"\x80\x04]" + b"\x94" * 50 + b"h\xff."):
        (tmp_path / "common.pt").write_bytes(content)
        with pytest.raises(DataError, match=r"common\.pt"):
            read_file(tmp_path / "common.pt")


@pytest.mark.parametrize(
    ("text", "name"),
    [("[1, 2", "x.yaml"), ("- a\n- b", "x.yaml"), ("a = [", "x.toml"), ("{}", "x.json"), ("import os", "config.py"), ("a: &a [*a]\nb: " + "[" * 3000, "x.yaml")],
)  # fmt: skip
def test_a_file_that_no_stack_wrote_is_one_readable_error(text: str, name: str) -> None:
    with pytest.raises(DataError):
        read_text(text, name=name)


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack not in ("megatron-lm", "fsdp2")])
def test_random_plain_data_ends_in_an_answer_or_in_our_own_error(stack: str) -> None:
    import random

    import yaml

    words = ["bf16", "fp8", "mixed_precision", "distributed", "model", "optimizer", "trainer", "training", "enabled", "torch_dtype", "zero_optimization", "x"]  # fmt: skip
    values: list[Any] = [None, True, -1, 3.5, "bf16", "hybrid", "", [1, "a"], "nan", {"enabled": "yes"}]
    for seed in range(12):
        pick = random.Random(seed)

        def tree(depth: int, pick: random.Random = pick) -> Any:
            if depth == 0 or pick.random() < 0.3:
                return pick.choice(values)
            return {pick.choice(words): tree(depth - 1) for _ in range(pick.randint(1, 4))}

        text = yaml.safe_dump({pick.choice(words): tree(3) for _ in range(3)})
        try:
            found = read_text(text, stack=stack, name="x.yaml")
        except MpbridgeError:
            continue
        str(answer(found.fields, engine=found.engine, meaning=found.meaning))


SHARED = b")" + b"2\x86" * 60
"""A tuple that holds one tuple twice, which holds another twice: 2**60 values in 121 bytes."""


@pytest.mark.parametrize(  # a value, a name, a list of itself
    "value", [b"X\x01\x00\x00\x00a" + SHARED, SHARED + b"N", b"X\x01\x00\x00\x00a]q\x00h\x00a"], ids=range(3)
)
def test_arguments_without_an_end_are_refused_at_once(tmp_path, value):
    """A pickle of some hundred bytes whose values would take ages to write down."""
    namespace = b"cargparse\nNamespace\n)\x81}(" + value + b"ub"
    (tmp_path / "common.pt").write_bytes(b"\x80\x02}(X\x04\x00\x00\x00args" + namespace + b"u.")
    started = time.process_time()
    with pytest.raises(DataError, match=r"nested too deep|more than 100000 values"):
        read_file(tmp_path / "common.pt")
    assert time.process_time() - started < 10


def test_switches_of_a_checkpoint_that_are_no_truth_values_are_one_error(tmp_path):
    torch.save({"args": argparse.Namespace(bf16="x", fp16=1)}, tmp_path / "common.pt")
    with pytest.raises(BadValue, match=r"(?s)bf16='x': expected True or False.*fp16=1"):
        read_file(tmp_path / "common.pt")
