"""Folders in served formats hold what training's GEMMs read: compared with emulated models, and refused where a format cannot hold it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpbridge.common.errors import BadValue, CheckpointError, Contradiction
from mpbridge.common.facts import Parallel
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.huggingface.served import FORMATS, misfits
from mpbridge.training.serving.cast import Served, ServedWeights, TrainedWith, values
from mpbridge.training.serving.convert import opened, to_checkpoint, to_folder
from mpbridge.training.serving.files import Shards, planned
from mpbridge.training.serving.folder import examine
from tests.training.serving import folders, models

COMPUTED: dict[str, dict[str, torch.Tensor]] = {}


@pytest.fixture
def computed(path: Path, layer: None) -> dict[str, dict[str, torch.Tensor]]:
    """Scaling -> module of the folder -> the values that an emulated model's forward GEMM reads."""
    from mpbridge.backend.engines.registry import build_engine

    found = COMPUTED  # the engines' world is set up for each test, the models once
    for scaling, recipe in models.RECIPES.items():
        if scaling == "rowwise" or scaling in found:
            continue
        built = build_engine(
            folders.run_of(
                path.parent.parent / "bf16", f"mixed_precision={recipe}", "emulate=true", "optimizer.lr=1e-3"
            )
        )
        try:
            folders.load(built, path)
            found[scaling] = {}
            for name, plug in built.emulation.plugs.items():
                weight = dict(built.named_parameters())[f"{name}.weight"].detach()
                operand = plug.fprop.operand(weight, slot=name, gemm="fprop", side="w", first_microbatch=True)
                number, _, below = name.removeprefix("decoder.layers.").partition(".")
                parts = [f"model.layers.{number}.{part}" for part in models.PARTS[below]]
                found[scaling] |= dict(zip(parts, models.apart(below, operand.dequantized()), strict=True))
        finally:
            built.close()
    return found


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name.replace(" ", "-"))
def test_a_served_folder_holds_what_the_forward_gemm_reads(row, path, computed, tmp_path: Path) -> None:
    for scaling in row.scalings:
        if scaling not in models.RECIPES:
            continue
        folder = models.serve(path, tmp_path / scaling, row.method, models.RECIPES[scaling])
        found, contract = models.read_back(folder), json.loads((folder / "contract.json").read_text())
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        kept = set(config[row.kept])
        if scaling == "rowwise":  # torchao's own cast, one power of two per row
            name = "model.layers.1.self_attn.o_proj"
            weight = models.weights()[f"{name}.weight"].float()
            scale = torch.exp2(torch.floor(torch.log2(448 / weight.abs().amax(1, keepdim=True).double()))).float()
            assert torch.equal(found[name], (weight * scale).to(torch.float8_e4m3fn).float() / scale)
            continue
        assert found.keys() == computed[scaling].keys() == contract["modules"].keys()
        for name, wanted in computed[scaling].items():
            assert torch.allclose(found[name], wanted, rtol=3e-7 if row.second else 0, atol=0), name
        linears = {name.removesuffix(".weight") for name in models.weights() if "proj" in name} | {"lm_head"}
        assert kept == linears - found.keys()
        assert contract["tensors"].keys() == load_file(folder / "model.safetensors").keys()


def test_fused_linears_share_the_scales_of_the_whole(path: Path, tmp_path: Path) -> None:
    held = load_file(
        models.serve(path, tmp_path / "a", "compressed-tensors", models.RECIPES["nvfp4"]) / "model.safetensors"
    )
    amax = max(float(models.weights()[f"model.layers.0.self_attn.{part}_proj.weight"].abs().max()) for part in "qkv")
    scales = [float(held[f"model.layers.0.self_attn.{part}_proj.weight_global_scale"]) for part in "qkv"]
    assert scales == [pytest.approx(2688 / amax)] * 3
    folder = models.serve(path, tmp_path / "b", "modelopt", models.RECIPES["tensorwise"])
    per_row = load_file(folder / "model.safetensors")
    gate, up = (per_row[f"model.layers.1.mlp.{part}_proj.weight_scale"] for part in ("gate", "up"))
    assert gate.shape == (384,)
    assert len({*gate.tolist(), *up.tolist()}) == 1


def test_each_tensor_parallel_rank_keeps_its_scales(path: Path, tmp_path: Path) -> None:
    with opened(path) as export:
        made = Served(path, export, "compressed-tensors", models.RECIPES["tensorwise"])
    one = next(cast.one for cast in made.training.found if cast.one.name == "decoder.layers.1.mlp.linear_fc1.weight")
    gate, up = (models.weights()[f"model.layers.1.mlp.{part}_proj.weight"].float() for part in ("gate", "up"))
    found = made.named(made.parts(one, torch.cat([gate, up]).bfloat16(), split=2))
    for rank in (0, 1):
        rows = slice(192 * rank, 192 * rank + 192)
        scale = 448 / max(gate[rows].abs().max(), up[rows].abs().max())
        for part, weight in (("gate", gate), ("up", up)):
            assert torch.allclose(found[f"model.layers.1.mlp.{part}_proj.weight_scale"][rows], 1 / scale, rtol=2e-7)
            codes = found[f"model.layers.1.mlp.{part}_proj.weight"][rows]
            assert (codes.float() / scale - weight[rows]).abs().max() <= 16 / scale  # half a step at 448
    two = replace(made.facts, parallel=Parallel(world_size=2, tensor=2))
    reasons = " ".join(misfits(made.row, made.training.found, two))
    why = "self_attention.linear_proj: each of 2 tensor-parallel ranks has its own scales for its columns"
    assert reasons.startswith(why)
    assert "linear_fc1" not in reasons


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(path: Path, tmp_path: Path, cli) -> None:
    def convert(*options: str) -> str:
        told = cli("convert", f"ckpt:{path}", f"hf:{tmp_path / 'out'}", *options, code=2)
        assert not list(tmp_path.iterdir())
        return told

    mxfp8, delayed = models.RECIPES["mxfp8"], "bf16_with_fp8_delayed_scaling_mixed"
    told = convert("--quantization", "fp8", "--recipe", mxfp8)
    assert (
        "the recipe's scaling is mxfp8, and fp8 holds one of blockwise (these weights fit compressed-tensors MXFP8, modelopt MXFP8"
        in told
    )
    assert "the recipe quantizes no weight" in convert("--quantization", "fp8")
    assert "no served format holds these weights unchanged" in convert(
        "--quantization", "modelopt", "--recipe", delayed
    )
    assert "only with --quantization" in convert("--recipe", mxfp8)


@pytest.mark.parametrize("tensor", [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int32)], ids=["shape", "dtype"])
def test_a_tensor_that_is_not_what_the_header_says_is_not_written(tensor: torch.Tensor, tmp_path: Path) -> None:
    plan = planned([("a", "F32", (2, 3)), ("b", "F32", (2,))])
    with pytest.raises(CheckpointError, match=r"a is .*, expected F32 \[2, 3\]"):  # noqa: SIM117
        with Shards(tmp_path, plan, "x", lambda done, total: None) as shards:
            shards.put("a", tensor)


def test_a_refusal_on_the_way_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Served, "from_main", lambda self, one: True
    )  # as for a native run, whose main weights are missing
    with pytest.raises(CheckpointError, match="has no FP32 main weight"):
        models.serve(path, tmp_path / "out", "modelopt", models.RECIPES["mxfp8"])
    assert not list(tmp_path.iterdir())


def test_a_weight_of_zeros_has_a_second_level_scale_of_one(tmp_path: Path) -> None:
    given = models.weights()
    given["model.layers.1.self_attn.o_proj.weight"].zero_()
    path = folders.convert(folders.write(tmp_path / "bf16", models.CONFIG, given), tmp_path / "run").path
    for method, name in (("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")):
        folder = models.serve(path, tmp_path / method, method, models.RECIPES["nvfp4"])
        held = load_file(folder / "model.safetensors")
        assert held[f"model.layers.1.self_attn.o_proj.{name}"].item() == 1.0
        assert not models.read_back(folder)["model.layers.1.self_attn.o_proj"].any()
        assert examine(folder, path, recipe=models.RECIPES["nvfp4"]).found == []


def test_weights_that_are_not_finite_are_refused_or_said(tmp_path: Path, cli) -> None:
    given = models.weights()
    given["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    given["model.norm.weight"][7] = float("inf")
    path = folders.convert(folders.write(tmp_path / "bf16", models.CONFIG, given), tmp_path / "run").path
    command = ["convert", f"ckpt:{path}", f"hf:{tmp_path / 'out'}"]
    said = "decoder.layers.1.mlp.linear_fc2.weight has 1 of 98,304 values that are not finite"
    served = ("--quantization", "modelopt", "--recipe", models.RECIPES["mxfp8"])
    assert said in cli(*command, *served, code=1, error=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bf16", "run"]
    out = cli(*command)
    assert "model.layers.1.mlp.down_proj.weight has 1 of 98,304 values that are not finite" in out
    assert "model.norm.weight has 1 of 256 values" in out
    # two NaNs of the same bits are the same value, and no less invalid
    assert {(one.name, one.kind) for one in examine(tmp_path / "out", path).found} == {
        ("model.layers.1.mlp.down_proj.weight", "invalid"),
        ("model.norm.weight", "invalid"),
    }


def test_what_is_written_is_judged_and_not_what_it_is_cast_from(tmp_path: Path) -> None:
    given = models.weights()
    given["model.norm.weight"][3] = 1e5  # FP16 ends at 65504
    path = folders.convert(folders.write(tmp_path / "bf16", models.CONFIG, given), tmp_path / "run").path
    said = "model.norm.weight has 1 of 256 values that are not finite: the model computes with them"
    assert to_folder(path, tmp_path / "fp16", dtype="float16").notes == [said]
    assert to_folder(path, tmp_path / "plain").notes == []


def test_a_run_under_other_settings_is_not_served_with_its_folders_config(tmp_path: Path) -> None:
    place = folders.write(tmp_path / "bf16", models.CONFIG, models.weights())
    path = to_checkpoint(place, tmp_path / "run", folders.run_of(place, "model.rotary_base=5")).path
    with pytest.raises(Contradiction, match=r"model.rotary_base=5.0: config.json of llama says 10000"):
        to_folder(path, tmp_path / "out")
    place = folders.write(tmp_path / "like", models.CONFIG | {"rope_theta": 5.0}, {})
    assert (
        json.loads((to_folder(path, tmp_path / "out", like=place).path / "config.json").read_text())["rope_theta"] == 5
    )


@pytest.mark.parametrize(("scaling", "bound"), [("mxfp8", 2**-4), ("tensorwise", 2**-4), ("nvfp4", 2**-2)])
def test_the_values_of_a_parameter_are_those_of_each_ranks_share(scaling: str, bound: float, tmp_path: Path) -> None:
    """Two ranks of 176 columns: five blocks of 32 and a half. Half the distance of two codes bounds the error, of a rank's own scale alone."""
    given, wide = models.weights(), models.CONFIG | {"intermediate_size": 352}
    given |= {name: one[:352] for name, one in given.items() if one.shape == (384, 256)}
    given |= {name: one[:, :352] for name, one in given.items() if one.shape == (256, 384)}
    for name in (name for name in given if "down_proj" in name):
        given[name] = torch.cat([given[name][:, :176], given[name][:, 176:] * 256], 1)
    place = folders.write(tmp_path / "bf16", wide, {name: one.contiguous() for name, one in given.items()})
    container = ConfigContainer.load(f"hf:{place}", ["parallel.tensor_model_parallel_size=2"])
    path = to_checkpoint(place, tmp_path / "run", container.resolved(2, training=False)).path
    with opened(path) as export:
        served = ServedWeights(TrainedWith.of(path, export.run, export.wanted, models.RECIPES[scaling]), None)
        (one,) = (one for one in export.wanted if one.name == "decoder.layers.1.mlp.linear_fc2.weight")
        whole = export.read(one).float()
        for half, share in zip(served.values(one, export.read(one)).chunk(2, 1), whole.chunk(2, 1), strict=True):
            assert float((half - share).norm() / share.norm()) < bound


def test_scales_that_fit_no_block_are_refused() -> None:
    with pytest.raises(BadValue, match=r"scales \[4, 12\] of codes \[4, 352\]: expected one for each row"):
        values(torch.zeros(4, 352).to(torch.float8_e4m3fn), torch.ones(4, 12))


def test_config_json_has_the_dtype_of_what_is_not_quantized(tmp_path: Path) -> None:
    given = {name: one.float() for name, one in models.weights().items()}
    place = folders.write(tmp_path / "fp32", models.CONFIG | {"torch_dtype": "float32"}, given)
    path = folders.convert(place, tmp_path / "run").path
    for folder in (
        models.serve(path, tmp_path / "a", "modelopt", models.RECIPES["mxfp8"]),
        models.serve(path, tmp_path / "b", "fp8", models.RECIPES["blockwise"]),
    ):
        held = load_file(folder / "model.safetensors")
        assert held["model.embed_tokens.weight"].dtype is torch.float32
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a mount point"])
def test_a_place_that_a_folder_cannot_replace_is_refused_before_anything_is_written(
    kind: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "out"
    if kind == "a mount point":
        target.mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda self: self == target)
    else:
        target.symlink_to(tmp_path / ("real" if kind == "a link" else "nowhere"))
    done: list[int] = []
    with pytest.raises(BadValue, match="out already exists, a link or a mount point: expected a new folder"):
        to_folder(path, target, told=lambda count, total: done.append(count))
    assert not done
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "real"]


def test_the_runs_own_recipe_by_name_is_not_another(tmp_path: Path) -> None:
    path = models.checkpoint(tmp_path, f"mixed_precision={models.RECIPES['mxfp8']}")
    named = [None, models.RECIPES["mxfp8"], models.RECIPES["blockwise"]]
    folders_ = [
        models.serve(path, tmp_path / str(n), "fp8" if n == 2 else "mxfp8", recipe) for n, recipe in enumerate(named)
    ]
    said = [json.loads((folder / "contract.json").read_text())["requantized"] for folder in folders_]
    assert said == [False, False, True]


def test_heads_of_64_rows_do_not_fit_blocks_of_128(tmp_path: Path) -> None:
    place = folders.write(tmp_path / "bf16", folders.LLAMA, folders.llama_tensors())
    taken = folders.convert(place, tmp_path / "run")
    with pytest.raises(
        BadValue, match=r"blocks of 128 rows span query, key and value at heads of 16 rows; .*gate and up at 96 rows"
    ):
        models.serve(taken.path, tmp_path / "out", "fp8", models.RECIPES["blockwise"])


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("mxfp8", [], "compressed-tensors MXFP8, modelopt MXFP8, mxfp8 MXFP8, with the codes and scales of training"),
        ("blockwise", [], "no format without quantizing anew: self_attention.linear_qkv: blocks of 128 rows span"),
        ("blockwise", ["model.num_attention_heads=2"], "fp8 FP8 by 128 x 128 blocks, compressed-tensors FP8"),
        (
            "tensorwise",
            ["parallel.tensor_model_parallel_size=2"],
            "no format without quantizing anew: self_attention.linear_proj: each of 2",
        ),
        # a rank's 176 columns are five blocks and a half
        (
            "mxfp8",
            ["parallel.tensor_model_parallel_size=2", "model.ffn_hidden_size=352"],
            "no format without quantizing anew: mlp.linear_fc2: blocks of 32 columns end at ranks of 176 columns",
        ),
        ("nemotron_h_bf16_with_fp8_current_scaling_mixed", [], "high precision: no weight of this model is quantized"),
    ],
)
def test_check_says_how_a_run_can_be_served(recipe: str, words: list[str], said: str, cli) -> None:
    asked = ("check --emulate --config gpt_tiny --recipe", models.RECIPES.get(recipe, recipe), *words)
    assert f"served as: {said}" in cli(*asked, code=(0, 1))
    assert "served as" not in cli("check --recipe bf16_mixed --config gpt_tiny", code=(0, 1))
