"""What the stacks do on a CPU that their file names, and with the FSDP version that it does or does not name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_text

FP32, BF16, FP16 = DType.FP32, DType.BF16, DType.FP16


def accelerate(**said: Any) -> Imported:
    return read_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **said}), stack="accelerate", name="a.yaml")


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU"])
def test_accelerate_trains_fp32_under_fp16_on_a_cpu(kind: str) -> None:
    found = accelerate(distributed_type=kind, mixed_precision="fp16", use_cpu=True)
    meaning = found.meaning
    assert (meaning.compute, meaning.autocast, meaning.loss_scale) == (FP32, None, None)
    assert any("on a CPU (use_cpu) accelerate silently trains in FP32" in line for line in found.inert)
    assert not any("a GPU:" in line for line in found.assumed)
    low = accelerate(distributed_type=kind, mixed_precision="bf16", use_cpu=True)
    assert (low.meaning.autocast, low.inert) == (BF16, ())


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU", "DEEPSPEED", "MEGATRON_LM"])
def test_use_cpu_is_inert_where_accelerates_launcher_does_not_hand_it_on(kind: str) -> None:
    found = accelerate(distributed_type=kind, mixed_precision="fp16", use_cpu=True)
    assert found.meaning.compute is FP16
    assert any(line.startswith("use_cpu:") for line in found.inert)


def test_several_cpus_without_use_cpu_are_said() -> None:
    assert any("uses a GPU" in line for line in accelerate(distributed_type="MULTI_CPU").inert)


def test_fp8_on_a_cpu_is_torchaos_alone() -> None:
    said: dict[str, Any] = {"distributed_type": "NO", "mixed_precision": "fp8", "use_cpu": True}
    assert any("runs only on GPUs" in line for line in accelerate(**said).contradicts)
    torchao = accelerate(**said, fp8_config={"backend": "AO"})
    assert not torchao.contradicts
    assert any("the first and the last linear" in line for line in torchao.cannot_express)


def lightning(text: str) -> Imported:
    return read_args(text, stack="lightning")


@pytest.mark.parametrize("word", ["16", "16-mixed"])
def test_lightning_trains_bf16_under_16_on_a_cpu(word: str) -> None:
    found = lightning(f"precision={word} accelerator=cpu")
    assert found.meaning == lightning("precision=bf16-mixed accelerator=cpu").meaning
    assert any("trains bf16-mixed" in line for line in found.inert)
    assert lightning(f"precision={word} accelerator=gpu").meaning.compute is FP16
    assert lightning("precision=16-true accelerator=cpu").meaning.storage is FP16


@pytest.mark.parametrize("word", ["16-mixed", "bf16-mixed"])
def test_lightning_trains_fp32_beside_an_accelerator_that_is_an_object(word: str) -> None:
    accelerator = {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}
    text = json.dumps({"trainer": {"precision": word, "accelerator": accelerator}})
    found = read_text(text, stack="lightning", name="l.yaml")
    assert (found.meaning.compute, found.meaning.autocast, found.meaning.loss_scale) == (FP32, None, None)
    assert any("CPUAccelerator" in line for line in found.inert)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2"])
def test_lightning_refuses_strategies_for_gpus_on_a_cpu(strategy: str) -> None:
    found = lightning(f"precision=16-mixed accelerator=cpu strategy={strategy}")
    assert any("it needs a GPU" in line for line in found.contradicts)


def test_transformers_trains_fp32_under_fp16_on_a_cpu() -> None:
    found = read_args("--fp16 --use_cpu", stack="transformers")
    assert (found.meaning.compute, found.meaning.loss_scale) == (FP32, None)
    assert any(line.startswith("fp16:") for line in found.inert)
    sharded = read_args("--bf16 --use_cpu --fsdp full_shard", stack="transformers")
    assert sharded.meaning.sharded == "nothing"
    assert any(line.startswith("fsdp with use_cpu") for line in sharded.contradicts)


def test_transformers_shards_with_fsdp2_unless_its_config_says_1() -> None:
    def autocast(config: Any) -> DType | None:
        data = {"output_dir": "x", "bf16": True, "fsdp": True, "fsdp_config": config}
        return read_text(json.dumps(data), stack="transformers", name="t.json").meaning.autocast

    assert (autocast(None), autocast({"version": 2}), autocast("fsdp.json")) == (None, None, None)
    assert (autocast({"version": 1}), autocast({"fsdp_version": "1"})) == (BF16, BF16)
