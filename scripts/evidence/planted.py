"""Small real training runs with a planted fault, and healthy ones, to evaluate `mpbridge diagnose` against known causes.

    python scripts/evidence/planted.py make OUT [--kinds a,b] [--seeds 1,2,3]     # makes the runs; CAUSE.json in each states what was planted
    python scripts/evidence/planted.py judge OUT                                  # what diagnose reports for each, and how often it is right

A plant is a hook that damages a live training run; diagnose only sees the run's files. The plants in this file do not depend on how diagnose works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpbridge.training.base import Hook

STEPS = 60
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "max_sequence_length": 32,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
    "persist_layer_norm": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
}  # fmt: skip
DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
# with two layers, both are edge layers
CURRENT: Any = {"recipe": "bf16_with_fp8_current_scaling_mixed", "first_last_layers_bf16": False}


def base(out: Path, recipe: Any, seed: int, **sections: dict[str, Any]) -> Any:
    from mpbridge.settings.container import ConfigContainer

    text = out.parent / "text.txt"
    if not text.exists():
        drawn = random.Random(0)
        words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 7))) for _ in range(300)]
        text.write_text("".join(" ".join(drawn.choices(words, k=9)) + ".\n" for _ in range(6000)))
    own: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "optimizer": {"lr": 4e-3, "weight_decay": 0.01, "clip_grad": 1.0},
        "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 5},
        "train": {"micro_batch_size": 8, "global_batch_size": 8, "train_iters": STEPS, "eval_interval": None, "seed": seed, "audit": "warn"},
        "data": {"corpus": str(text), "split": "90,10", "cache_dir": str(out.parent / "cache")},
        "logger": {"log_dir": str(out), "precision_every": 5, "progress": False},
    }  # fmt: skip
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    made = ConfigContainer(mixed_precision=recipe, **merged)
    made.emulate = True
    return made


def train(container: Any, hook: Any = None) -> None:
    from mpbridge.training.loop import pretrain

    pretrain(container.resolved(), hooks=[hook] if hook else [], quiet=True)


class Plant(Hook):
    """Acts before a step; `act` gets the training and the number of the coming step."""

    def __init__(self, act: Callable[[Any, int], None]) -> None:
        self.act = act

    def stepping(self, training: Any) -> None:
        self.act(training, training.counters.iteration + 1)


def weights(training: Any, name: str) -> list[Any]:
    """The parameter and its main weights."""
    return [
        one.tensor
        for one in training.engine.tensors()
        if one.parameter == name and one.role in ("params", "main_params")
    ]


def optimizers(training: Any) -> list[Any]:
    return list(training.engine.optimizer.chained_optimizers)


def table_of(training: Any, side: str) -> Any:
    quantizer = next(iter(training.engine.emulation.quantizers.values()))
    return quantizer.backward_table if side == "dy" else quantizer.forward_table


# --- the plants ----------------------------------------------------------------------------------------------------------------------------
def outlier_channel(out: Path, seed: int, at: int) -> None:
    """One channel of a norm's gain is a few thousand times too large from one step on."""
    name = f"decoder.layers.{seed % 2}.{('input', 'pre_mlp')[seed % 3 == 0]}_layernorm.weight"

    def act(training: Any, step: int) -> None:
        if step == at:
            for tensor in weights(training, name):
                tensor.data[7 * seed % 64] *= 3000.0

    train(base(out, CURRENT, seed), Plant(act))


def wrong_scale(out: Path, seed: int, at: int) -> None:
    """One tensor's delayed scale is off by many powers of two from one step on."""
    name, side, power = [
        ("decoder.layers.0.mlp.linear_fc2", "x", 9),
        ("decoder.layers.1.self_attention.linear_qkv", "w", 8),
        ("decoder.layers.1.mlp.linear_fc1", "dy", -16),
    ][seed % 3]

    def act(training: Any, step: int) -> None:
        if step >= at:
            table = table_of(training, side)
            table.scale[table.names.index(f"{name}.{side}")] *= 2.0**power

    train(base(out, DELAYED, seed), Plant(act))


def frozen_scale(out: Path, seed: int, at: int) -> None:
    """Delayed scales stop following their histories early in the run."""
    kept: dict[str, Any] = {}

    def act(training: Any, step: int) -> None:
        for side in ("x", "dy"):
            table = table_of(training, side)
            if step == 2 + seed:
                kept[side] = table.scale.clone()
            elif step > 2 + seed:
                table.scale = kept[side].clone()

    train(base(out, DELAYED, seed), Plant(act))


class Noise:
    """An engine's batches with random tokens at some steps."""

    def __init__(self, steps: range, seed: int) -> None:
        self.steps, self.seed = steps, seed

    def act(self, training: Any, step: int) -> None:
        import torch

        engine = training.engine
        if getattr(engine, "_planted", False):
            return
        real = engine.train_step
        generator = torch.Generator().manual_seed(self.seed)

        def train_step(batches: Any, *, microbatches: int) -> Any:
            now = training.counters.iteration + 1
            if now in self.steps:
                batches = (self._spoiled(batch, generator) for batch in batches)
            return real(batches, microbatches=microbatches)

        engine.train_step, engine._planted = train_step, True

    def _spoiled(self, batch: Any, generator: Any) -> Any:
        import torch

        found = dict(batch)
        for key in ("tokens", "labels"):
            found[key] = torch.randint(0, 256, batch[key].shape, generator=generator)
        return found


def data_spike(out: Path, seed: int, at: int) -> None:
    """A few batches of bytes that are not text."""
    train(
        base(out, (CURRENT, "bf16_mixed", DELAYED)[seed % 3], seed),
        Plant(Noise(range(at, at + 2 + seed % 3), seed).act),
    )


def rate_too_high(out: Path, seed: int, at: int) -> None:
    """A learning rate too high for the model, reached after a warm-up."""
    made = base(out, (CURRENT, "bf16_mixed", DELAYED)[seed % 3], seed, optimizer={"lr": (0.3, 0.5, 1.0)[seed % 3]}, scheduler={"lr_warmup_iters": 20 + at % 10})  # fmt: skip
    train(made)


def lost_main_weights(out: Path, seed: int, at: int) -> None:
    """The model is no longer refreshed from its main weights."""

    def act(training: Any, step: int) -> None:
        if step == at:
            for part in optimizers(training):
                part._copy_main_params_to_model_params = lambda *args, **named: None

    train(base(out, ("bf16_mixed", CURRENT, "bf16_mixed")[seed % 3], seed), Plant(act))


def bad_resume(out: Path, seed: int, at: int) -> None:
    """A resume with a different vocabulary from the trained one: rows of the embedding and the output layer are permuted."""
    save = {"checkpoint": {"save": str(out.parent / f"{out.name}-checkpoints")}}
    first = base(out, "bf16_mixed", seed, **save)
    first.train.exit_interval = at
    train(first)
    second = base(out, "bf16_mixed", seed, checkpoint={**save["checkpoint"], "load": save["checkpoint"]["save"]})

    def act(training: Any, step: int) -> None:
        import torch

        if step == at + 1:
            for name, _ in list(training.engine.named_parameters()):
                if "word_embeddings" in name or "output_layer" in name:
                    for tensor in weights(training, name):
                        tensor.data.copy_(torch.roll(tensor.data, seed, 0))

    train(second, Plant(act))


def loss_scale(out: Path, seed: int, at: int) -> None:
    """fp16's loss scale jumps far above what the gradients allow."""

    def act(training: Any, step: int) -> None:
        if step == at:
            for part in optimizers(training):
                part.grad_scaler._scale.fill_(2.0 ** (40 + 10 * seed))

    made = base(out, {"recipe": "fp16_mixed", "initial_loss_scale": 4096.0}, seed)
    made.emulate = False
    train(made, Plant(act))


def recipe_switch(out: Path, seed: int, at: int) -> None:
    """A schedule continues in FP8 with a margin that leaves no range."""
    margin = (14, 16, 18)[seed % 3]
    made = base(out, [{"recipe": "bf16_mixed", "until": at}, {"recipe": DELAYED, "fp8_margin": margin}], seed)
    train(made)


def weight_corrupted(out: Path, seed: int, at: int) -> None:
    """A flipped exponent bit: one element of one weight is huge."""
    name = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.self_attention.linear_proj.weight", "decoder.layers.1.mlp.linear_fc2.weight")[seed % 3]  # fmt: skip

    def act(training: Any, step: int) -> None:
        if step == at:
            for tensor in weights(training, name):
                tensor.data.view(-1)[11 * seed] = 2.0e4

    train(base(out, ("bf16_mixed", CURRENT, "bf16_mixed")[seed % 3], seed), Plant(act))


def gain_of_zero(out: Path, seed: int, at: int) -> None:
    """A norm's gain is set to zero once, between two measurements."""
    name = (
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
    )[seed % 3]

    def act(training: Any, step: int) -> None:
        if step == at:
            for tensor in weights(training, name):
                tensor.data.zero_()

    train(base(out, ("bf16_mixed", CURRENT, DELAYED)[seed % 3], seed), Plant(act))


def moments_lost(out: Path, seed: int, at: int) -> None:
    """The second moments are lost but not the first: one enormous update."""

    def act(training: Any, step: int) -> None:
        if step == at:
            for one in training.engine.tensors():
                if one.role == "exp_avg_sq":
                    one.tensor.mul_(1e-10)

    train(base(out, ("bf16_mixed", DELAYED, CURRENT)[seed % 3], seed), Plant(act))


def nan_source(out: Path, seed: int, at: int) -> None:
    """From one step on, a linear returns a NaN."""
    path = ("decoder.layers.1.mlp.linear_fc2", "decoder.layers.0.self_attention.linear_proj", "decoder.layers.1.mlp.linear_fc1")[seed % 3]  # fmt: skip

    def act(training: Any, step: int) -> None:
        if step != at:
            return
        module = next(module for name, module in training.engine.model[0].named_modules() if name.endswith(path))

        def spoil(_: Any, args: Any, output: Any) -> Any:
            first = output[0].clone()
            first.view(-1)[seed] = float("nan")
            return (first, *output[1:])

        module.register_forward_hook(spoil)

    train(base(out, (CURRENT, "bf16_mixed", DELAYED)[seed % 3], seed), Plant(act))


PLANTS: dict[str, Callable[[Path, int, int], None]] = {
    "outlier-channel": outlier_channel,
    "wrong-scale": wrong_scale,
    "frozen-scale": frozen_scale,
    "data-spike": data_spike,
    "rate-too-high": rate_too_high,
    "lost-main-weights": lost_main_weights,
    "bad-resume": bad_resume,
    "loss-scale": loss_scale,
    "recipe-switch": recipe_switch,
    "weight-corrupted": weight_corrupted,
    "weight-corrupted.gain": gain_of_zero,
    "moments-lost": moments_lost,
    "nan-source": nan_source,
}
"""Cause, by diagnose's name (before a dot) -> the function that plants it."""


def healthy(out: Path, number: int) -> None:
    """Healthy runs of many kinds: recipes, rates, a resume, a schedule, fp16 with its first overflows."""
    seed = 100 + number
    if number % 10 == 3:  # a resume
        save = str(out.parent / f"{out.name}-checkpoints")
        first = base(out, "bf16_mixed", seed, checkpoint={"save": save})
        first.train.exit_interval = 25
        train(first)
        train(base(out, "bf16_mixed", seed, checkpoint={"save": save, "load": save}))
    elif number % 10 == 5:  # a change of recipe
        train(base(out, [{"recipe": "bf16_mixed", "until": 30}, CURRENT], seed))
    elif number % 10 == 7:  # fp16 finds its scale
        made = base(out, {"recipe": "fp16_mixed", "initial_loss_scale": 2.0**24}, seed)
        made.emulate = False
        train(made)
    else:
        recipe = ("bf16_mixed", DELAYED, CURRENT, "fp32", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed")[number % 6]
        train(base(out, recipe, seed, optimizer={"lr": (1e-3, 4e-3, 8e-3)[number % 3]}))


Job = tuple[str, str | None, Callable[[Path], None]]
"""Name of a run, what is planted in it (None: nothing), the function that makes it."""


def planted_jobs(kinds: list[str], seeds: list[int]) -> list[Job]:
    return [
        (f"{kind}-{seed}", kind.partition(".")[0], lambda folder, k=kind, s=seed: PLANTS[k](folder, s, 31 + 3 * s))  # type: ignore[misc]
        for kind in kinds
        for seed in seeds
    ]


def healthy_jobs(numbers: range) -> list[Job]:
    return [(f"healthy-{i}", None, lambda folder, i=i: healthy(folder, i)) for i in numbers]  # type: ignore[misc]


def make(out: Path, jobs: list[Job]) -> None:
    import torch

    torch._dynamo.config.disable = True
    warnings.filterwarnings("ignore")
    out.mkdir(parents=True, exist_ok=True)
    for name, cause, plant in jobs:
        folder = out / name
        if (folder / "CAUSE.json").exists():
            continue
        began = time.perf_counter()
        try:
            plant(folder)
        except Exception as error:
            print(f"{name}: the run ended with {type(error).__name__}: {str(error)[:300]}", flush=True)
        if not (folder / "metrics.jsonl").exists():
            continue
        (folder / "CAUSE.json").write_text(json.dumps({"cause": cause}))
        print(f"{name}: made in {time.perf_counter() - began:.1f} s", flush=True)


def spiking(folder: Path) -> int | None:
    """The first step whose loss is a nat above the one before."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    pairs = itertools.pairwise(rows)
    return next((two["iteration"] for one, two in pairs if float(two["loss"]) > float(one["loss"]) + 1), None)


def judge(out: Path, damage: Callable[[Path], bool] = lambda folder: True) -> int:
    """A planted run is right if its cause is named first; a healthy run is right if no cause is named, even if its loss spikes by itself.

    damage: whether there is anything to explain in a planted run; runs without damage are counted separately.
    """
    from mpbridge.observe.diagnose.diagnosis import diagnose

    right: dict[str, list[bool]] = {}
    harmless: list[bool] = []
    for path in sorted(out.glob("*/CAUSE.json")):
        planted, folder = json.loads(path.read_text())["cause"], path.parent
        found = diagnose(folder)
        named = found.suspects[0].cause if found.suspects else None
        notes = (
            []
            if named == planted
            else [f"<- planted {planted}; all: {[(s.cause, round(s.score, 2)) for s in found.suspects]}"]
        )
        if planted is None and (step := spiking(folder)):
            notes.append(f"nothing was planted, but its loss rises by more than 1 nat at step {step}")
        if planted is not None and not damage(folder):
            notes.append("no visible damage")
            harmless.append(named == planted)
        else:
            right.setdefault(planted or "healthy", []).append(named == planted)
        print(f"{folder.name:24} {named}   {'; '.join(notes)}".rstrip())
    healthy_runs = right.pop("healthy", [])
    hits, runs = sum(map(sum, right.values())), sum(map(len, right.values()))
    for cause, results in sorted(right.items()):
        print(f"{cause:20} {sum(results)} of {len(results)}")
    print(f"named first: {hits} of {runs} planted ({100 * hits / max(runs, 1):.0f} %)")
    if harmless:
        print(f"including those without visible damage: {hits + sum(harmless)} of {runs + len(harmless)}")
    print(f"healthy runs accused: {len(healthy_runs) - sum(healthy_runs)} of {len(healthy_runs)}")
    return 0 if hits >= 0.8 * runs and all(healthy_runs) else 1


def arguments(description: str | None, *, seeds: str, healthy: int) -> argparse.ArgumentParser:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "judge"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", default=",".join(PLANTS))
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--healthy", type=int, default=healthy)
    return parser


def main() -> int:
    args = arguments(__doc__, seeds="1,2,3", healthy=24).parse_args()
    if args.what == "judge":
        return judge(args.out)
    kinds, seeds = [kind for kind in args.kinds.split(",") if kind], [int(seed) for seed in args.seeds.split(",")]
    make(args.out, planted_jobs(kinds, seeds) + healthy_jobs(range(args.healthy)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
