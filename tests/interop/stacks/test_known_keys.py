"""Keys that a stack does not know, keys that are not about precision, and those that are and decide nothing; checkpoints; versions never read."""

from __future__ import annotations

import argparse
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import DataError
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_args, read_file, read_text
from mpbridge.interop.stacks.reading import known

TEXTS = {
    "accelerate": ("{compute_environment: X, mixed_precision: bf16, num_processes: 8, %s}", "mixed_precison: bf16", "mixed_precision"),
    "accelerate fsdp": ("{mixed_precision: bf16, num_processes: 8, fsdp_config: {%s}}", "fsdp_versoin: 2", "fsdp_config.fsdp_version"),
    "deepspeed": ('{"bf16": {"enabled": true}, "train_batch_size": 8, %s}', '"zero_optimisation": {"stage": 1}', "zero_optimization"),
    "deepspeed zero": ('{"train_batch_size": 8, "zero_optimization": {%s}}', '"overlap_com": true', "zero_optimization.overlap_comm"),
    "lightning": ("{trainer: {precision: bf16-mixed, max_epochs: 8, %s}}", "accumulate_grad_batch: 2", "trainer.accumulate_grad_batches"),
    "transformers": ("{bf16: true, learning_rate: 1, %s}", "gradient_checkpoint: true", "gradient_checkpointing"),
    "torchtitan": ("{training: {dtype: bfloat16, steps: 8, %s}}", "mixed_precision_params: float32", "training.mixed_precision_param"),
    "torchtitan top": ("{training: {steps: 8}, %s}", "trainig: {dtype: bfloat16}", "training"),
    "automodel": ("{distributed: {tp_size: 8, mp_policy: {%s}}}", "parm_dtype: bfloat16", "distributed.mp_policy.param_dtype"),
    "automodel top": ("{model: {torch_dtype: bf16}, seed: 8, %s}", "distribted: {strategy: ddp}", "distributed"),
    "megatron-bridge": ("{mixed_precision: bf16_mixed, train: {train_iters: 8}, %s}", "mixed_precison: fp16_mixed", "mixed_precision"),
    "megatron-bridge optimizer": ("{mixed_precision: bf16_mixed, train: {train_iters: 8}, optimizer: {%s}}", "exp_avg_dtyp: torch.bfloat16", "optimizer.exp_avg_dtype"),
}  # fmt: skip


def read(name: str, more: str) -> Imported:
    return read_text(TEXTS[name][0] % more, stack=name.split()[0], name="x.yaml")


@pytest.mark.parametrize("name", TEXTS)
def test_an_unknown_key_is_named_with_the_nearest_and_others_are_told_from_it(name: str) -> None:
    _, more, near = TEXTS[name]
    found = read(name, more)
    assert any(f"(nearest: {near})" in line for line in found.unknown), found.unknown
    assert len(found.unknown) == 1
    assert len(found.other) >= 1
    without = read(name, '"_x": 1')
    assert without.unknown == ()


def test_each_stack_has_its_list_of_keys() -> None:
    assert all(len(set().union(*known(name.split()[0]).values())) > 30 for name in TEXTS)


def test_a_key_about_precision_that_decides_nothing_is_said_and_is_not_among_the_others() -> None:
    text = "{compute_environment: X, mixed_precision: bf16, fp8_config: {amax_history_len: 3}}"
    found = read_text(text, name="a.yaml")
    assert any("fp8_config.amax_history_len=3" in line for line in found.assumed)
    flags = read_args("--bf16 --keep-fp8-transpose-cache --lr 1")
    assert flags.other == ("--lr",)
    assert any("--keep-fp8-transpose-cache" in line for line in flags.assumed)
    names = ", ".join(f"a{i}_dtype: bf16" for i in range(9))
    many = read_text(f"{{model: {{{names}}}, distributed: {{strategy: fsdp2}}}}", stack="automodel")
    assert sum("a3_dtype" in line for line in many.assumed) == 1


def test_auto_of_deepspeed_is_said_to_be_filled_in_by_another() -> None:
    text = '{"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "fp16": {"enabled": "auto"}}'
    found = read_text(text, stack="deepspeed")
    assert found.undecided[0].startswith("bf16.enabled=auto")


def test_the_verb_counts_what_is_not_about_precision_in_one_line(file, cli) -> None:
    text = "{compute_environment: X, mixed_precision: bf16, num_processes: 8, machine_rank: 0, mixed_precison: x}"
    printed = cli("import", file("a.yaml", text), code=(0, 1))
    assert "3 other settings are not about precision" in printed
    assert "mixed_precison (nearest: mixed_precision)" in printed


def test_a_version_that_was_never_read_is_said_with_what_was_assumed() -> None:
    for stack, text in {"megatron-lm": "--bf16", "lightning": "precision=bf16-mixed", "transformers": "--bf16"}.items():
        found = read_args(text, stack=stack, version="0.1.2")
        assert "0.1.2 is not supported" in found.assumed[0]
        assert found.version in found.assumed[0]
        assert not any("not supported" in line for line in read_args(text, stack=stack, version=found.version).assumed)


def arguments(**more: Any) -> dict[str, Any]:
    said = {"bf16": True, "params_dtype": torch.bfloat16, "fp8": "e4m3", "fp8_recipe": "blockwise", **more}
    return {"args": argparse.Namespace(**said), "iteration": 20}


@pytest.mark.parametrize("name", ["common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_the_folder_of_a_checkpoint_is_read(tmp_path: Path, name: str, legacy: bool) -> None:
    contents = {10: {"args": argparse.Namespace(fp16=True)}, 20: arguments(weights=torch.ones(3))}
    for iteration, content in contents.items():
        file = tmp_path / f"iter_{iteration:07}" / name
        file.parent.mkdir(parents=True)
        torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    for place in (tmp_path, tmp_path / "iter_0000020", file):
        assert read_file(place).fields["fp8_recipe"] == "blockwise"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert read_file(tmp_path).fields["fp16"] is True


def saved_by_torch(folder: Path) -> Path:
    """As Megatron-LM's formats torch_dcp and fsdp_dtensor: every leaf of the state for itself."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group, and it says so
        checkpoint.save(arguments() | {"model": {"weight": torch.ones(3)}}, checkpoint_id=folder)
    return folder


def test_arguments_that_are_one_of_the_objects_of_torchs_format_are_read(tmp_path: Path) -> None:
    folder = saved_by_torch(tmp_path / "iter_0000020")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    for place in (tmp_path, folder, folder / ".metadata"):
        assert read_file(place).fields["fp8_recipe"] == "blockwise"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("relative_path", "../__0_0.distcp", "names no file beside it"),
        ("relative_path", "..", "names no file beside it"),
        ("relative_path", None, "names no file beside it"),
        ("offset", -1, "no place in __0_0"),
        ("length", 2**40, "no place in __0_0"),
        ("offset", 2**40, "neither torch's archive nor a pickle"),
    ],
)
def test_a_table_that_points_elsewhere_is_one_readable_error(tmp_path: Path, field, value, word) -> None:
    file = saved_by_torch(tmp_path / "here") / ".metadata"
    table = pickle.loads(file.read_bytes())
    for info in table.storage_data.values():
        setattr(info, field, value)
    file.write_bytes(pickle.dumps(table))
    with pytest.raises(DataError, match=rf"\.metadata: .*{word}"):
        read_file(file.parent)


@pytest.mark.parametrize("protocol", range(6))
def test_a_plain_pickle_of_any_protocol_is_read_and_nothing_is_made_of_it(tmp_path: Path, protocol: int) -> None:
    file, said = tmp_path / "model_optim_rng.pt", argparse.Namespace(bf16=True, fp8="hybrid", hysteresis=2, lr=0.1)
    file.write_bytes(pickle.dumps({"args": said}, protocol=protocol))
    assert read_file(file).fields["fp8_recipe"] == "delayed"


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"latest_checkpointed_iteration.txt": "../../etc"}, "expected an iteration's number"),
        ({"latest_checkpointed_iteration.txt": "7"}, "iter_0000007 does not exist"),
        ({"model.safetensors": "x", "config.json": "{}"}, "a model in Hugging Face's format"),
        ({}, "found nothing"),
        ({"common.pt": "PAR1 and so on"}, "neither torch's archive nor a pickle"),
        ({"common.pt": "x" * 257 + "ustar" + "x" * 300}, "a tar archive"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_one_readable_error(tmp_path: Path, files: dict[str, str], word: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=word):
        read_file(tmp_path)


def test_a_checkpoint_of_bridge_is_read_from_its_run_config(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003" / "run_config.yaml").write_text("mixed_precision: bf16_with_mxfp8_mixed\nddp: {}\n")
    assert read_file(tmp_path).stack == "megatron-bridge"
