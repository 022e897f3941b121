"""A served folder and training on the same tokens: equal where bytes and activations are, and the linear that is not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mpbridge.common.errors import BadValue
from mpbridge.training.serving.mismatch import _model, mismatch
from tests.training import survival
from tests.training.serving import models

TEXT = "".join(f"line {number} of a text that has enough bytes\n" for number in range(40))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mismatch")
    return models.checkpoint(root, f"mixed_precision={models.RECIPES['mxfp8']}", "data.seq_length=64")


def test_the_same_bytes_and_activations_compute_the_same(path: Path, tmp_path: Path) -> None:
    found = mismatch(path, models.serve(path, tmp_path / "out", "modelopt"), TEXT, sequences=3)
    served, plain = found.distances
    assert found.tokens == 192
    # only the order of sums differs
    assert served.mean < 1e-3 * plain.mean
    assert 0 <= served.k3 < 1e-3 * plain.k3
    assert served.greedy == 0.0
    assert plain.mean > 1e-4


def test_a_checkpoint_of_a_schedule_is_measured_in_the_stage_that_saved_it(tmp_path: Path) -> None:
    recipe = models.RECIPES["mxfp8"]
    edge = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
    stages = [{"recipe": "bf16_mixed", "until": 2}, {"recipe": recipe, **edge, "until": 4}, {"recipe": recipe}]
    saved = {"save": str(tmp_path), "save_interval": 2, "async_save": False}
    # megatron-core trains them with a distributed optimizer only, and a stage is known by its states too
    states = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    ddp = {"use_distributed_optimizer": True}
    survival.go(survival.run(stages, emulate=True, checkpoint=saved, ddp=ddp, optimizer=states))
    for step, kept in ((4, (0,)), (6, ())):
        with _model(tmp_path / f"step_0000000{step}") as engine:
            assert (engine.run.recipe, engine.run.policy.bf16_layers(2)) == (recipe, kept)
    with pytest.raises(BadValue, match="its recipe bf16_mixed quantizes nothing"), _model(tmp_path / "step_00000002"):
        pass


def test_a_folder_in_high_precision_is_plain_bf16(path: Path) -> None:
    served, plain = mismatch(path, path.parent.parent / "bf16", TEXT, sequences=2).distances
    assert (served.mean, served.k3, served.loss) == (plain.mean, plain.k3, plain.loss)


def test_parameters_that_are_no_linears_are_the_folders(path: Path, tmp_path: Path) -> None:
    folder = models.serve(path, tmp_path / "out", "modelopt")
    same = mismatch(path, folder, TEXT, sequences=1)
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.input_layernorm.weight"] *= 2
    save_file(held, folder / "model.safetensors")
    found = mismatch(path, folder, TEXT, sequences=1)
    assert found.distances[0].mean > 100 * same.distances[0].mean
    assert found.distances[1] == same.distances[1]  # plain BF16 has the run's own again


def test_the_linear_that_differs_comes_first(path: Path, tmp_path: Path, cli) -> None:
    folder = models.serve(path, tmp_path / "out", "compressed-tensors")
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.mlp.down_proj.weight_scale"] += 2  # four times as large
    save_file(held, folder / "model.safetensors")
    (tmp_path / "text").write_text(TEXT)
    command = ["mismatch", str(path), str(folder), "--tokens", str(tmp_path / "text"), "--sequences", "1", "--json"]
    found = json.loads(cli(*command))
    assert next(iter(found["linears"].items())) == ("decoder.layers.1.mlp.linear_fc2", pytest.approx(3.0, rel=0.01))
    assert found["distances"][0]["mean"] > found["distances"][1]["mean"]
    assert found["recipe"] == models.RECIPES["mxfp8"]


def test_what_cannot_be_measured_is_refused(path: Path, tmp_path: Path) -> None:
    folder = models.serve(path, tmp_path / "out", "modelopt")
    with pytest.raises(BadValue, match="expected at least 65: one sequence"):
        mismatch(path, folder, "short")
    held = load_file(folder / "model.safetensors")
    del held["model.layers.1.mlp.down_proj.weight_scale"]
    save_file(held, folder / "model.safetensors")
    with pytest.raises(BadValue, match=r"model.layers.1.mlp.down_proj.weight cannot be read \(mpbridge contract"):
        mismatch(path, folder, TEXT)
