"""Runs of mpbridge's own engine over Transformer Engine: built as on the GPU, audited, trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpbridge import ConfigContainer, pretrain
from mpbridge.cli.main import main
from mpbridge.planning.memory.roles import roles
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.te_cpu.played import now
from mpbridge.training.base import Hook
from tests.te_cpu.two_ranks import BLOCKWISE, DELAYED, MXFP8, NVFP4, OVERLAP, ROOT, TENSORWISE

BLACKWELL = now().capability >= (10, 0)
TINY = (
    "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.max_sequence_length=128", "data.seq_length=128",
    "train.train_iters=3", "train.global_batch_size=2", "train.eval_interval=null", "ddp.use_distributed_optimizer=true", "scheduler.lr_warmup_iters=0",
)  # fmt: skip


def tiny(recipe: str, *overrides: str, model: str = "gpt_tiny"):
    """A run of the played machine and release."""
    played = ["emulate=te", f"target={now().machine.name}", f"te='{'.'.join(map(str, now().release[:2]))}'"]
    settings = [f"mixed_precision.recipe={recipe}", *TINY, *played, *overrides]
    return ConfigContainer.load(ROOT / f"configs/{model}.yaml", settings).resolved()


class Seen(Hook):
    """What the model's weights were, and the audit's word."""

    def built(self, training) -> None:
        self.classes = {name: type(tensor).__name__ for name, tensor in training.engine.named_parameters()}
        self.modules = {type(module).__module__.partition(".")[0] for module in training.engine.model[0].modules()}


if BLACKWELL:
    RUNS = ((MXFP8, "MXFP8Tensor", OVERLAP), (NVFP4, "Parameter", ()))
else:
    RUNS = ((DELAYED, "Float8Tensor", OVERLAP), (BLOCKWISE, "Parameter", ()))


@pytest.mark.parametrize(
    ("recipe", "weights", "overrides"), RUNS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_recipe_trains_on_transformer_engines_modules_and_passes_its_audit(recipe, weights, overrides) -> None:
    seen = Seen()
    overrides = ("train.audit=stop", "audit.every=1", "train.eval_interval=2", "train.eval_iters=1", *overrides)
    summary = pretrain(tiny(recipe, *overrides), hooks=[seen], quiet=True)
    assert summary.last_loss < summary.first_loss
    assert seen.classes["decoder.layers.0.self_attention.linear_qkv.weight"] == weights
    assert seen.classes["embedding.word_embeddings.weight"] == "Parameter"
    assert "transformer_engine" in seen.modules


def test_adapters_train_beside_a_stored_base() -> None:
    seen = Seen()
    recipe, weights, overrides = RUNS[0]
    run = tiny(recipe, "train.audit=stop", "model.num_layers=1", *overrides, model="lora_tiny")
    summary = pretrain(run, hooks=[seen], quiet=True)
    assert summary.last_loss < summary.first_loss
    assert seen.classes["decoder.layers.0.self_attention.linear_qkv.weight"] == weights


LLAMA = (
    "model.num_layers=1", "model.normalization=RMSNorm", "model.activation_func=silu", "model.gated_linear_unit=true", "model.add_bias_linear=false",
    "model.position_embedding_type=rope", "model.share_embeddings_and_output_weights=false",
)  # fmt: skip


@pytest.mark.skipif(not BLACKWELL, reason="delayed scaling's codes do not follow from the weight")
def test_adapters_beside_a_stored_base_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged linear is what its stored codes stand for and alpha / rank times B A, of the live tensors after the last step."""
    recipe, weights, overrides = RUNS[0]
    live: dict[str, torch.Tensor] = {}

    class Last(Seen):
        def stepped(self, training, result) -> None:
            proj = "decoder.layers.0.self_attention.linear_proj."
            for name, tensor in training.engine.named_parameters():
                if name.startswith(proj):
                    live[name.removeprefix(proj)] = tensor.detach().float().clone()

    seen = Last()
    pretrain(tiny(recipe, f"checkpoint.save={tmp_path / 'run'}", *LLAMA, *overrides, model="lora_tiny"), hooks=[seen], quiet=True)  # fmt: skip
    assert seen.classes["decoder.layers.0.self_attention.linear_proj.weight"] == weights
    export = ["convert", f"ckpt:{tmp_path / 'run'}", f"hf:{tmp_path / 'hf'}", "--adapters", "merged-after"]
    assert main([*export, "--dtype", "fp32"]) == 0
    assert "merged after" in " ".join(capsys.readouterr().out.split())
    found = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    change = 16 / 8 * live["adapter.linear_out.weight"] @ live["adapter.linear_in.weight"]
    assert change.abs().max() > 0
    torch.testing.assert_close(found, live["weight"] + change, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not BLACKWELL, reason="NVFP4 is a B200's")
def test_adapters_train_beside_a_base_stored_in_nvfp4() -> None:
    """A frozen base is in no buffer, so that megatron-core 0.16 can store it in four bits; what it holds is what is planned, to the byte."""
    held: Counter[str] = Counter()

    class Held(Seen):
        def built(self, training) -> None:
            super().built(training)
            codes, scales = ("_rowwise_data", "_columnwise_data"), ("_rowwise_scale_inv", "_columnwise_scale_inv")
            for name, tensor in training.engine.named_parameters():
                if self.classes[name] == "NVFP4Tensor":
                    held["codes"] += sum(getattr(tensor, part).nbytes for part in codes)
                    held["scales"] += sum(getattr(tensor, part).nbytes for part in scales)
                else:
                    held["plain"] += tensor.nbytes
            run = training.engine.run
            for one in roles(run.policy, run.facts):
                held[one.name] -= one.bytes

    seen = Held()
    options = ("train.audit=stop", "model.num_layers=1", "mixed_precision.fp4_param=true")
    summary = pretrain(tiny(NVFP4, *options, model="lora_tiny"), hooks=[seen], quiet=True)
    assert summary.last_loss < summary.first_loss
    assert seen.classes["decoder.layers.0.self_attention.linear_qkv.weight"] == "NVFP4Tensor"
    assert held["codes"] + held["plain"] + held["params"] + held["weight_transposes"] == 0
    assert held["scales"] + held["weight_scales"] == 0


# the recipe that a Hopper runs keeps two layers at each end in BF16
BEFORE, PATTERN = (0, "M*-") if BLACKWELL else (2, "M-M*-M-")
HYBRID = (f"model.hybrid_override_pattern={PATTERN}", f"model.num_layers={len(PATTERN)}")
FIRST, *OTHERS = [MXFP8] if BLACKWELL else [f"nemotron_h_{TENSORWISE}", BLOCKWISE, DELAYED, f"nanov2_{TENSORWISE}", "bf16_mixed", "fp32"]  # fmt: skip
HYBRIDS = [FIRST, *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in OTHERS)]


@pytest.mark.parametrize("recipe", HYBRIDS)
def test_a_hybrid_trains_stops_and_goes_on_to_the_bit(recipe, tmp_path) -> None:
    """megatron-core's hybrid over the kernels in plain torch, audited in every part; Mamba's projections are stored as the recipe says."""

    def run(folder: str, *more: str) -> tuple[Steps, Seen]:
        steps, seen = Steps(False), Seen()
        saved = [f"checkpoint.{way}={tmp_path / folder}" for way in ("save", "load")]
        settings = ["train.audit=stop", *HYBRID, *(OVERLAP if BLACKWELL else ()), *saved, *more]
        pretrain(tiny(recipe, *settings, model="nemotron_h_tiny"), hooks=[steps, seen], quiet=True)
        return steps, seen

    whole, seen = run("whole")
    parts = [step for _ in range(2) for step in run("parts", "train.exit_interval=2")[0].seen]
    assert parts == whole.seen
    policy = resolve(get_mixed_precision_config(recipe))
    kinds = {"mxfp8": "MXFP8Tensor", "blockwise": "Float8BlockwiseQTensor"}
    stored = kinds.get(policy.quants[0].scaling, "Float8Tensor") if policy.stored else "Parameter"
    assert seen.classes[f"decoder.layers.{BEFORE}.mixer.in_proj.weight"] == stored
    assert {kind for name, kind in seen.classes.items() if ".mixer.conv1d" in name} == {"Parameter"}


class Steps(Hook):
    """Loss and gradient norm of every step; every tensor of the engine is read in between where `looks`."""

    def __init__(self, looks: bool) -> None:
        self.looks, self.seen, self.read = looks, [], 0

    def stepped(self, training, result) -> None:
        self.seen.append((result.loss, result.grad_norm))
        for live in training.engine.tensors() if self.looks else ():
            self.read += bool(torch.isfinite(live.tensor.detach().float()).all())


def test_reading_the_engines_tensors_between_steps_changes_nothing() -> None:
    looking, alone = Steps(True), Steps(False)
    recipe, _, overrides = RUNS[0]
    for steps in (looking, alone):
        pretrain(tiny(recipe, *overrides), hooks=[steps], quiet=True)
    assert looking.read > 100
    assert looking.seen == alone.seen


def test_megatron_keeps_what_it_imported_and_everything_else_is_given_back() -> None:
    import sys

    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert HAVE_TE
    assert torch.cuda.is_available()
    assert sys.modules["transformer_engine_torch"].mpbridge
