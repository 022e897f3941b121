"""Megatron Bridge's own pretrain() under a recipe of mpbridge, on a CPU that plays a GPU: a GPT of four layers, mock data, a few steps.

    mpbridge on-cpu --target h100 scripts/evidence/stacks/bridge_pretrain.py bf16_with_fp8_current_scaling_mixed --steps 20
    mpbridge on-cpu --target b200 scripts/evidence/stacks/bridge_pretrain.py bf16_with_nvfp4_mixed

    mpbridge on-cpu --target h100 scripts/evidence/stacks/bridge_pretrain.py bf16_mixed --steps 20 --record seen.pt
    mpbridge on-cpu --target h100 scripts/evidence/stacks/bridge_pretrain.py bf16_mixed --steps 20 --own seen.pt

RECIPE: a name, a file or module:function. --record: also writes the weights before the first step and every micro-batch that the model was given; --own: mpbridge's own loop
over Transformer Engine, on those micro-batches and from the same seed; it says whether the weights before the first step are equal. --theirs: by Bridge's own registry instead. --plant: changes a setting between apply and pretrain, as a script could:
the callback has to end the run. It prints the losses as JSON, one object on the last line. docs/stacks/megatron_bridge.md says what to install.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

PLANTS = {
    "mixed_precision": "Bridge's own recipe over ours (fp16_mixed)",
    "wire": "gradients reduced in the other dtype",
    "weight": "one weight that the update does not reach",
    "quantization": "linears of the model in FP8 (delayed scaling), or none if the recipe says so",
    "frozen": "an optimizer whose step updates nothing",
    "evaluation": "an evaluation without FP8",
    "raises": "an error inside a step: what the callback installed is gone",
}


MODEL = {
    "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 256, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip

BRIDGES = {
    "cross_entropy_loss_fusion": True,
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "attention_softmax_in_fp32": False,
}
"""Where Bridge's defaults are not mpbridge's."""


def container(
    recipe: str | None, *, steps: int, folder: str | None, load: str | None, seed: int = 1234, evaluate: int = 0
) -> Any:
    """Bridge's ConfigContainer of a tiny GPT; recipe: Bridge's own name of a precision."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge

    model = GPTModelProvider(**MODEL, seq_length=64, share_embeddings_and_output_weights=False)
    data = {
        "reset_attention_mask": False,
        "reset_position_ids": False,
        "eod_mask_loss": False,
        "dataloader_type": "single",
    }
    decay = {"start_weight_decay": 0.01, "end_weight_decay": 0.01, "weight_decay_incr_style": "constant"}
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=steps, global_batch_size=4, micro_batch_size=2, eval_interval=evaluate or 1000, eval_iters=bool(evaluate)),
        optimizer=bridge.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, overlap_param_gather=True),
        scheduler=bridge.SchedulerConfig(lr_decay_style="constant", lr_decay_iters=100, override_opt_param_scheduler=True, **decay),
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
        dataset=bridge.MockGPTDatasetConfig(random_seed=seed, seq_length=64, num_dataset_builder_threads=1, num_workers=0, **data),
        logger=bridge.LoggerConfig(log_interval=1000),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=255),
        checkpoint=bridge.CheckpointConfig(save=folder, save_interval=steps if folder else None, load=load, ckpt_format="torch_dist"),
        rng=bridge.RNGConfig(seed=seed),
        mixed_precision=recipe,
    )  # fmt: skip


def plain(module: Any) -> dict[str, Any]:
    """Every parameter of a chunk, in high precision, by its name without wrappers."""
    return {
        name.replace("module.", ""): getattr(one, "dequantize", one.detach)().detach().clone()
        for name, one in module.named_parameters()
    }


def looks(planted: str | None, record: bool = False) -> Any:
    """A callback of the script's own: losses, the classes of the live parameters, and the plants that need live objects."""
    from megatron.bridge.training.callbacks import Callback

    class Looks(Callback):
        def __init__(self) -> None:
            self.losses: dict[int, str] = {}
            self.parameters: dict[str, int] = {}
            self.seen: dict[str, Any] = {"batches": [], "losses": []}

        def on_train_start(self, context: Any) -> None:
            self.model = context.model
            self.parameters = dict(
                Counter(f"{type(p).__name__} {str(p.dtype)[6:]}" for p in context.model[0].parameters())
            )
            if record:
                self.seen["weights"] = plain(context.model[0])
                self.seen["config"] = {name: repr(value) for name, value in vars(context.model[0].config).items()}
                context.model[0].register_forward_pre_hook(self._given, with_kwargs=True)
            if planted == "weight":
                context.optimizer.step = _all_but(next(context.model[0].parameters()), context.optimizer.step)
            if planted == "frozen":
                context.optimizer.step = lambda: (True, 0.0, 0)
            if planted == "raises":
                context.optimizer.step = lambda: 1 / 0

        def _given(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.seen["batches"].append({"tokens": named["input_ids"].clone(), "labels": named["labels"].clone()})

        def on_eval_start(self, context: Any) -> None:
            if planted == "evaluation":
                for module in context.model[0].modules():
                    if hasattr(module, "config"):
                        module.config.fp8 = None

        def on_train_step_end(self, context: Any) -> None:
            loss = float(context.loss_dict["lm loss"].flatten()[0])
            self.losses[context.state.train_state.step + 1] = f"{loss:.6f}"
            self.seen["losses"].append(loss)

    return Looks()


def _all_but(weight: Any, step: Any) -> Any:
    def update() -> Any:
        before = weight.detach().clone()
        result = step()
        weight.data.copy_(before)
        return result

    return update


def own(recipe: str, steps: int, seen: dict[str, Any], target: str) -> None:
    """mpbridge's own loop on what Bridge's model was given; prints the losses as JSON."""
    import torch
    import transformer_engine

    from mpbridge import ConfigContainer, pretrain
    from mpbridge.training.base import Hook

    losses: list[float] = []
    same: list[str] = []

    class Compares(Hook):
        def built(self, training: Any) -> None:
            mine = plain(training.engine.model[0])
            same[:] = [name for name, one in seen["weights"].items() if not torch.equal(one, mine[name])]
            config = {name: repr(value) for name, value in vars(training.engine.model[0].config).items()}
            for name in sorted(config.keys() & seen["config"]):
                if config[name] != seen["config"][name] and not name.endswith(("_func", "timers", "init_method")):
                    print(f"config.{name}: {config[name]} here, {seen['config'][name]} there")

        def stepped(self, training: Any, result: Any) -> None:
            losses.append(result.loss)

    samples = [
        {name: part[i] for name, part in batch.items()}
        for batch in seen["batches"]
        for i in range(len(batch["tokens"]))
    ]
    container = ConfigContainer(
        mixed_precision=recipe, model=MODEL | BRIDGES, emulate="te", target=target,
        te=".".join(transformer_engine.__version__.split(".")[:2]),
        optimizer={"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.01},
        scheduler={"lr_decay_style": "constant"},
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        train={"train_iters": steps, "global_batch_size": 4, "micro_batch_size": 2, "seed": 1234, "eval_iters": 0},
        data={"seq_length": 64},
    )  # fmt: skip
    pretrain(container.resolved(1), dataset=samples, hooks=[Compares()], quiet=True)
    equal = [mine == theirs for mine, theirs in zip(losses, seen["losses"], strict=True)]
    shown = {step: f"{loss:.6f}" for step, loss in enumerate(losses, 1)}
    print(
        json.dumps(
            {"recipe": recipe, "losses": shown, "equal to the bit": sum(equal), "other weights at the start": same}
        )
    )


def plant(cfg: Any, name: str | None) -> None:
    """Changes settings behind the recipe's back."""
    if name == "mixed_precision":
        cfg.mixed_precision = "fp16_mixed"
    if name == "wire":
        cfg.ddp.grad_reduce_in_fp32 = not cfg.ddp.grad_reduce_in_fp32
    if name == "quantization":
        cfg.model.fp4, cfg.model.fp8 = None, None if cfg.model.fp8 or cfg.model.fp4 else "hybrid"


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--show", action="store_true", help="print the plan and what the callback saw")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="evaluate after every N steps")
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--own", metavar="FILE")
    parser.add_argument("--target", default="h100", help="with --own")
    asked = parser.parse_args()
    if asked.own:
        import torch

        own(asked.recipe, asked.steps, torch.load(asked.own), asked.target)
        return
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from mpbridge.compat import megatron_bridge
    from mpbridge.observe.witnessing.callbacks import bridge_callback

    cfg = container(
        asked.recipe if asked.theirs else None,
        steps=asked.steps,
        folder=asked.save,
        load=asked.load,
        evaluate=asked.evaluate,
    )
    looking, watching = looks(asked.plant, bool(asked.record)), []
    if not asked.theirs:
        plan = megatron_bridge.apply(cfg, asked.recipe)
        watching = [bridge_callback(asked.recipe, at={1, 2, asked.steps}, show=print if asked.show else None)]
        if asked.show:
            print(plan)
    plant(cfg, asked.plant)
    try:
        pretrain(cfg, forward_step, callbacks=[looking, *watching])
    except ZeroDivisionError:
        hooks = [
            name
            for name, module in looking.model[0].named_modules()
            if module._forward_hooks or module._forward_pre_hooks
        ]
        print(json.dumps({"observing": watching[0].witness.observing, "hooks": hooks}))
        return
    if asked.record:
        import torch

        torch.save(looking.seen, asked.record)
    print(json.dumps({"recipe": asked.recipe, "losses": looking.losses, "parameters": looking.parameters}))


if __name__ == "__main__":  # the checkpoint writer starts processes that import this file
    main()
