"""What a policy means on an engine, however far its tensors are divided, and what a word means in every stack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpbridge.common.formats import DType
from mpbridge.common.traits import engine_names
from mpbridge.interop.stacks.importers import read_args
from mpbridge.interop.stacks.meaning import Meaning, differences, of_policy
from mpbridge.interop.stacks.words import meanings
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("sharded", ["nothing", "optimizer", "gradients", "everything"])
def test_weights_that_are_their_own_main_weights_have_no_fp32_copy_wherever_they_lie(engine, sharded) -> None:
    meant = of_policy(resolve(get_mixed_precision_config("full_bf16")), engine=engine, sharded=sharded)
    assert meant.main is None
    assert meant.exp_avg.short == "bf16"


def test_what_follows_from_a_set_up_is_in_force_though_nobody_states_it() -> None:
    plain = Meaning(storage=DType.BF16, compute=DType.BF16, wire=DType.FP32, accumulator=DType.FP32)
    assert [plain.in_force(name) for name in ("softmax_fp32", "residual_fp32", "pipeline")] == [None, None, None]
    cast = replace(plain, storage=DType.FP32, autocast=DType.BF16)
    assert (cast.in_force("softmax_fp32"), cast.in_force("residual_fp32")) == (True, True)
    # parameters that are cast when they are gathered give embeddings, and so the stream, in the compute dtype
    assert replace(cast, sharded="everything").in_force("residual_fp32") is None
    whole = replace(plain, storage=DType.FP32, compute=DType.FP32, softmax_fp32=False)
    assert (whole.in_force("softmax_fp32"), whole.in_force("residual_fp32")) == (True, True)
    assert replace(plain, residual_fp32=True).in_force("pipeline") is DType.FP32
    # what nobody states is no difference; what one side states is
    assert "softmax_fp32" not in differences(plain, cast)
    assert differences(replace(plain, softmax_fp32=True), plain)["softmax_fp32"] == ("true", "the model's own")
    assert "softmax_fp32" not in differences(replace(plain, softmax_fp32=True), cast)


WORDS = ["fp8", "hybrid", "32-true", "16-true", "16-mixed", "bf16-mixed", "bf16-true", "no", "float8", "rowwise", "transformer-engine", "tensorwise", "delayed",
     "mxfp8", "nvfp4", "--bf16", "--bf16 --use-distributed-optimizer", "--bf16 --use-torch-fsdp2", "--bf16 --use-megatron-fsdp", "bf16_mixed", "bf16",
     "training.dtype=bfloat16", "torch_dtype: bfloat16", "strategy: megatron_fsdp", "strategy: ddp", "mixed_precision=bf16", "bf16=True", "bf16.enabled",
     "torch_autocast.enabled", "fp16", "fp32", "full_bf16"]  # fmt: skip


def test_every_word_answers() -> None:
    assert all(meanings(word) for word in WORDS)


def test_a_words_row_is_what_import_reads_or_its_recipe() -> None:
    ours = next(one.meaning for one in meanings("full_bf16") if one.stack == "mpbridge")
    assert (ours.sharded, ours.bytes_text) == ("nothing", "8")
    flags = "--bf16 --use-distributed-optimizer"
    rows = [
        ("lightning", "DeepSpeed", word, f"precision={word} strategy=deepspeed") for word in ("bf16-mixed", "16-true")
    ]
    for stack, where, word, args in (*rows, ("megatron-lm", "--use-distributed-optimizer", flags, flags)):
        row = next(one for one in meanings(word) if one.stack == stack and one.where.startswith(where))
        assert not differences(row.meaning, read_args(args, stack=stack).meaning).keys() - {"loss_scale"}, word
