"""The twelve kinds of scripts/evidence/planted.py, drawn at random for every seed: step, site, strength, recipe, model, rate and length of the run.

    python scripts/evidence/planted_anew.py make OUT [--kinds a,b] [--seeds 7,8,9] [--healthy N --first K]
    python scripts/evidence/planted_anew.py judge OUT

Independent of what diagnose looks at, so that it gives figures on seeds that diagnose was not tuned for: choose seeds that were never
used. A plant that does no visible damage (`damage`) is counted separately: there is nothing to explain in such a run.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import planted
from planted import CURRENT, DELAYED, Noise, Plant, base, optimizers, table_of, train, weights

MXFP8: Any = {"recipe": "bf16_with_mxfp8_mixed", "first_last_layers_bf16": False}
MATRICES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Draw:
    """The parameters of one planted run, drawn from its kind and its seed."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(f"anew-{kind}-{seed}")
        self.seed = 5000 + seed
        self.steps = self.pick(90, 100, 120)
        self.at = self.random.randint(int(0.4 * self.steps), int(0.65 * self.steps))
        self.layers = self.pick(2, 3)
        self.hidden = self.pick(64, 96)
        self.every = self.pick(3, 5, 8)
        self.lr = self.pick(3e-3, 4e-3, 6e-3)

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def power(self, low: float, high: float) -> float:
        """A strength, uniform in its logarithm."""
        return float(10 ** self.random.uniform(low, high))

    def matrix(self) -> str:
        return f"decoder.layers.{self.random.randrange(self.layers)}.{self.pick(*MATRICES)}"

    def run(self, out: Path, recipe: Any, **sections: dict[str, Any]) -> Any:
        text = out.parent / "few_words.txt"
        if not text.exists():
            # twenty words: in so few steps a model learns more about them than letter frequencies, so there is something to lose
            drawn = random.Random(1)
            words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(3, 7))) for _ in range(20)]
            text.write_text("".join(" ".join(drawn.choices(words, k=9)) + ".\n" for _ in range(6000)))
        own: dict[str, dict[str, Any]] = {
            "model": {**planted.MODEL, "num_layers": self.layers, "hidden_size": self.hidden, "ffn_hidden_size": 2 * self.hidden},
            "optimizer": {"lr": self.lr, "weight_decay": 0.01, "clip_grad": 1.0},
            "train": {
                "micro_batch_size": 16, "global_batch_size": 16, "train_iters": self.steps, "eval_interval": None, "seed": self.seed,
                "audit": "warn",
            },
            "data": {"corpus": str(text)},
            "logger": {"log_dir": str(out), "precision_every": self.every, "progress": False},
        }  # fmt: skip
        merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
        return base(out, recipe, self.seed, **merged)


def outlier_channel(out: Path, draw: Draw) -> None:
    """One channel becomes far larger than its neighbours: in a norm's gain, or in a row of the matrix that produces it."""
    site, strength, channel = draw.pick("gain", "row"), draw.power(2.7, 3.8), draw.random.randrange(draw.hidden)
    layer = draw.random.randrange(draw.layers)
    name = {
        "gain": f"decoder.layers.{layer}.{draw.pick('input', 'pre_mlp')}_layernorm.weight",
        "row": f"decoder.layers.{layer}.{draw.pick('self_attention.linear_proj', 'mlp.linear_fc2')}.weight",
    }[site]

    def act(training: Any, step: int) -> None:
        if step == draw.at:
            for tensor in weights(training, name):
                tensor.data[channel] *= strength

    train(draw.run(out, draw.pick(CURRENT, DELAYED, CURRENT)), Plant(act))


def wrong_scale(out: Path, draw: Draw) -> None:
    """A delayed scale is off by powers of two, up or down, from one step on."""
    side = draw.pick("x", "w", "dy")
    power = draw.pick(7, 10, -14, -17)
    name = draw.matrix()

    def act(training: Any, step: int) -> None:
        if step >= draw.at:
            table = table_of(training, side)
            table.scale[table.names.index(f"{name}.{side}")] *= 2.0**power

    train(draw.run(out, DELAYED), Plant(act))


def frozen_scale(out: Path, draw: Draw) -> None:
    """The scales of one side, or of all, stay at their value from early in the run."""
    sides, when = draw.pick(("x", "dy"), ("x",), ("dy",)), draw.random.randint(2, 9)
    kept: dict[str, Any] = {}

    def act(training: Any, step: int) -> None:
        for side in sides:
            table = table_of(training, side)
            if step == when:
                kept[side] = table.scale.clone()
            elif step > when:
                table.scale = kept[side].clone()

    train(draw.run(out, DELAYED), Plant(act))


class OtherData(Noise):
    """Batches of one repeated byte, of shuffled text, or of bytes that do not occur in text."""

    def __init__(self, steps: range, seed: int, kind: str) -> None:
        super().__init__(steps, seed)
        self.kind = kind

    def _spoiled(self, batch: Any, generator: Any) -> Any:
        import torch

        found = dict(batch)
        for key in ("tokens", "labels"):
            shape = batch[key].shape
            if self.kind == "constant":
                found[key] = torch.full(shape, int(torch.randint(128, 256, (1,), generator=generator)))
            elif self.kind == "high":
                found[key] = torch.randint(128, 256, shape, generator=generator)
            else:
                found[key] = torch.randint(0, 256, shape, generator=generator)
        return found


def data_spike(out: Path, draw: Draw) -> None:
    """Some batches of other data."""
    spoiled = OtherData(
        range(draw.at, draw.at + draw.random.randint(1, 5)), draw.seed, draw.pick("constant", "high", "random")
    )
    train(draw.run(out, draw.pick(CURRENT, "bf16_mixed", DELAYED, MXFP8)), Plant(spoiled.act))


def rate_too_high(out: Path, draw: Draw) -> None:
    """A learning rate too high for the model, reached slowly or at once, constant or decayed."""
    scheduler = {"lr_warmup_iters": draw.random.randint(3, 35), "lr_decay_style": draw.pick("constant", "cosine")}
    train(
        draw.run(
            out, draw.pick(CURRENT, "bf16_mixed", MXFP8), optimizer={"lr": draw.power(-0.7, 0.3)}, scheduler=scheduler
        )
    )


def lost_main_weights(out: Path, draw: Draw) -> None:
    """The model's weights stop following their main weights: all of them, or those of one layer."""
    part_only = draw.pick(False, True)
    layer = f"decoder.layers.{draw.random.randrange(draw.layers)}."

    def act(training: Any, step: int) -> None:
        if step != draw.at:
            return
        held = [
            one.tensor for one in training.engine.tensors() if one.role == "params" and one.parameter.startswith(layer)
        ]
        for part in optimizers(training):
            real = part._copy_main_params_to_model_params

            def copy(*args: Any, real: Any = real, **named: Any) -> None:
                if part_only:
                    before = [tensor.data.clone() for tensor in held]
                    real(*args, **named)
                    for tensor, old in zip(held, before, strict=True):
                        tensor.data.copy_(old)

            part._copy_main_params_to_model_params = copy

    train(draw.run(out, draw.pick("bf16_mixed", CURRENT, MXFP8)), Plant(act))


def bad_resume(out: Path, draw: Draw) -> None:
    """A resume that reads the checkpoint incorrectly: layers swapped, the rows of QKV in another order, or another vocabulary."""
    import torch

    folder, recipe = str(out.parent / f"{out.name}-checkpoints"), draw.pick("bf16_mixed", CURRENT)
    first = draw.run(out, recipe, checkpoint={"save": folder})
    first.train.exit_interval = draw.at
    train(first)
    kind = draw.pick("exchanged", "rows", "vocabulary")

    def act(training: Any, step: int) -> None:
        if step != draw.at + 1:
            return
        names = [name for name, _ in list(training.engine.named_parameters())]
        if kind == "exchanged":
            for name in [n for n in names if n.startswith("decoder.layers.0.")]:
                for one, two in zip(
                    weights(training, name), weights(training, name.replace("layers.0.", "layers.1.")), strict=True
                ):
                    kept = one.data.clone()
                    one.data.copy_(two.data)
                    two.data.copy_(kept)
            return
        wanted = ("linear_qkv.weight",) if kind == "rows" else ("word_embeddings.weight", "output_layer.weight")
        for name in [n for n in names if n.endswith(wanted)]:
            for tensor in weights(training, name):
                order = torch.randperm(tensor.shape[0], generator=torch.Generator().manual_seed(draw.seed))
                tensor.data.copy_(tensor.data[order])

    train(draw.run(out, recipe, checkpoint={"save": folder, "load": folder}), Plant(act))


def loss_scale(out: Path, draw: Draw) -> None:
    """fp16's loss scale is driven up, or down until gradients vanish."""
    kind, power = draw.pick("up", "down", "driven"), draw.random.randint(34, 70)

    def act(training: Any, step: int) -> None:
        for part in optimizers(training):
            scale = part.grad_scaler._scale
            if kind == "driven" and draw.at <= step < draw.at + 12:
                scale.mul_(2.0**6)
            elif kind == "up" and step == draw.at:
                scale.fill_(2.0**power)
            elif kind == "down" and step == draw.at:
                scale.fill_(2.0**-24)

    made = draw.run(out, {"recipe": "fp16_mixed", "initial_loss_scale": 2.0 ** draw.random.randint(8, 14)})
    made.emulate = False
    train(made, Plant(act))


def recipe_switch(out: Path, draw: Draw) -> None:
    """A schedule continues with a margin that leaves FP8 no range."""
    before = draw.pick({"recipe": "bf16_mixed"}, CURRENT, MXFP8)
    after = {"recipe": DELAYED, "fp8_margin": draw.random.randint(13, 20)}
    train(draw.run(out, [{**before, "until": draw.at}, after]))


def weight_corrupted(out: Path, draw: Draw) -> None:
    """One element of one matrix is wrong by orders of magnitude, of either sign."""
    name, value = f"{draw.matrix()}.weight", draw.pick(1, -1) * draw.power(3.0, 4.8)

    def act(training: Any, step: int) -> None:
        if step == draw.at:
            for tensor in weights(training, name):
                flat = tensor.data.view(-1)
                flat[(977 * draw.seed) % flat.numel()] = value

    train(draw.run(out, draw.pick("bf16_mixed", CURRENT, DELAYED)), Plant(act))


def moments_lost(out: Path, draw: Draw) -> None:
    """The second moments are nearly lost but not the first."""
    factor = draw.power(-12, -6)

    def act(training: Any, step: int) -> None:
        if step == draw.at:
            for one in training.engine.tensors():
                if one.role == "exp_avg_sq":
                    one.tensor.mul_(factor)

    train(draw.run(out, draw.pick("bf16_mixed", DELAYED, CURRENT, MXFP8)), Plant(act))


def nan_source(out: Path, draw: Draw) -> None:
    """From one step on, something returns NaN or infinity: a linear, a norm, in forward or in backward."""
    path = draw.pick(draw.matrix(), f"decoder.layers.{draw.random.randrange(draw.layers)}.pre_mlp_layernorm")
    bad, backward = float(draw.pick("nan", "inf")), draw.pick(False, False, True)

    def act(training: Any, step: int) -> None:
        if step != draw.at:
            return
        module = next(module for name, module in training.engine.model[0].named_modules() if name.endswith(path))

        def spoil(tensor: Any) -> Any:
            made = tensor.clone()
            made.view(-1)[draw.seed % 50] = bad
            return made

        def hook(_: Any, args: Any, output: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            if backward:
                first.register_hook(spoil)
            else:
                first = spoil(first)
            return (first, *rest) if isinstance(output, tuple) else first

        module.register_forward_hook(hook)

    train(draw.run(out, draw.pick(CURRENT, "bf16_mixed", DELAYED)), Plant(act))


PLANTS: dict[str, Callable[[Path, Draw], None]] = {kind: globals()[kind.replace("-", "_")] for kind in planted.PLANTS}
"""The same kinds, with the functions above."""


def damage(folder: Path) -> bool:
    """Whether there is anything to explain: the run broke off, a loss is NaN, steps were skipped, or the loss rose 0.3 nat above its best value."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [float(row["loss"]) for row in rows]
    kind, seed = folder.name.rsplit("-", 1)
    draw = Draw(kind, int(seed))
    if len(rows) < draw.steps or any(loss != loss for loss in losses):
        return True
    start = 15 if kind in ("rate-too-high", "frozen-scale") else draw.at - 1
    if sum(not row.get("applied", True) for row in rows[start:]) > 2:
        return True
    best = [min(sum(losses[j : j + 4]) / 4 for j in range(i - 3)) for i in range(start, len(losses))]
    return any(loss > calm + 0.3 for loss, calm in zip(losses[start:], best, strict=True))


def main() -> int:
    parser = planted.arguments(__doc__, seeds="7,8,9", healthy=0)
    parser.add_argument(
        "--first",
        type=int,
        default=24,
        help="number of the first healthy run; scripts/evidence/planted.py makes 0 to 23",
    )
    args = parser.parse_args()
    if args.what == "judge":
        return planted.judge(args.out, damage)
    jobs: list[planted.Job] = [
        (f"{kind}-{seed}", kind, lambda folder, k=kind, s=int(seed): PLANTS[k](folder, Draw(k, s)))  # type: ignore[misc]
        for kind in args.kinds.split(",")
        if kind
        for seed in args.seeds.split(",")
    ]
    planted.make(args.out, jobs + planted.healthy_jobs(range(args.first, args.first + args.healthy)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
