"""Healthy runs drawn at random for audit_faults.py: recipes, engines, models, optimizers, schedules of rates and of recipes, one and two processes, frozen parts, adapters on frozen bases, resumes."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SEED = 20261
STEPS = 4
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
ALL = {"first_last_layers_bf16": False}
RECIPES: dict[str, tuple[Any, str]] = {
    "fp32": ("fp32", "mcore"),
    "bf16": ("bf16_mixed", "mcore"),
    "fp16": ({"recipe": "fp16_mixed", "initial_loss_scale": 4096.0}, "mcore"),
    "fp16, overflowing at first": ({"recipe": "fp16_mixed", "initial_loss_scale": 2.0**22}, "mcore"),
    "full BF16": ("full_bf16", "mcore"),
    "BF16 wire": ({"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}, "mcore"),
    "BF16 moments": ("bf16_mixed_bf16_moments", "mcore"),
    "autocast": ({"recipe": "bf16_mixed", "autocast_enabled": True}, "mcore"),
    "FP32 residual": ({"recipe": "bf16_mixed", "fp32_residual_connection": True}, "mcore"),
    "FP32 logits": ({"recipe": "bf16_mixed", "logit_dtype": "fp32"}, "mcore"),
    "norms in FP32": ({"recipe": "bf16_mixed", "keep_fp32": ["*layernorm*"]}, "mcore"),
    "delayed": ({"recipe": "bf16_with_fp8_delayed_scaling_mixed", **ALL}, "mcore"),
    "tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **ALL}, "mcore"),
    "tensorwise, BF16 ends": ("bf16_with_fp8_current_scaling_mixed", "mcore"),
    "blockwise": ({"recipe": "bf16_with_fp8_subchannel_scaling_mixed", **ALL}, "mcore"),
    "MXFP8": ({"recipe": "bf16_with_mxfp8_mixed", **ALL}, "mcore"),
    "NVFP4": ({"recipe": "bf16_with_nvfp4_mixed", **ALL}, "mcore"),
    "one layer in MXFP8": ({"recipe": "bf16_mixed", "modules": {"mlp.*": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}}, "mcore"),
    "FSDP2": ("fp32_params_bf16_compute", "fsdp2"),
    "FSDP2, BF16 parameters": ("bf16_params_fp32_states", "fsdp2"),
    "FSDP2, tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", "fp8_param": False, **ALL}, "fsdp2"),
    "Megatron-FSDP": ("bf16_megatron_fsdp", "megatron_fsdp"),
}  # fmt: skip
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "wrapper": {"DDP": {}, "distributed optimizer": {"ddp": SHARDED}, "overlapped": {"ddp": OVERLAP}},
    "model": {
        "plain": {},
        "gated, RMS norms": {"model": {"normalization": "RMSNorm", "gated_linear_unit": True}},
        "biases, learned positions": {"model": {"add_bias_linear": True, "position_embedding_type": "learned_absolute"}},
        "grouped queries": {"model": {"num_query_groups": 2}},
        "query norms": {"model": {"qk_layernorm": True}},
        "dropout": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
        "recomputed": {"model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
        "experts": {"model": MOE},
        "sum of tokens": {"model": {"calculate_per_token_loss": True}},
        "one layer": {"model": {"num_layers": 1}},
        "three layers": {"model": {"num_layers": 3}},
    },
    "ends": {"tied": {"model": {"share_embeddings_and_output_weights": True}}, "untied": {"model": {"share_embeddings_and_output_weights": False}}},
    "optimizer": {
        "adam": {},
        "no clipping": {"optimizer": {"clip_grad": 0.0}},
        "tight clipping": {"optimizer": {"clip_grad": 0.05}},
        "no decay, no memory": {"optimizer": {"weight_decay": 0.0, "adam_beta1": 0.0}},
        "short memory": {"optimizer": {"adam_beta1": 0.8, "adam_beta2": 0.9, "weight_decay": 0.3}},
        "tiny rate": {"optimizer": {"lr": 1e-8}},
        "large rate": {"optimizer": {"lr": 3e-2, "clip_grad": 100.0}},
        "sgd": {"optimizer": {"optimizer": "sgd"}},
    },
    "rates": {
        "constant": {"scheduler": {"lr_decay_style": "constant"}},
        "to zero": {"scheduler": {"lr_decay_style": "linear"}},
        "zero before the end": {"scheduler": {"lr_decay_style": "linear", "lr_decay_iters": STEPS - 2}},
        "warm-up, cosine": {"scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 2}, "optimizer": {"min_lr": 1e-5}},
        "inverse square root": {"scheduler": {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 1}},
        "growing weight decay": {"scheduler": {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}},
    },
    "processes": {
        "1": {},
        "2, data": {},
        "2, tensor": {"parallel": {"tensor_model_parallel_size": 2}},
        "2, sequence": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
        "2, pipeline": {"parallel": {"pipeline_model_parallel_size": 2}, "model": {"num_layers": 2}},
        "2, expert": {"parallel": {"expert_model_parallel_size": 2}, "model": MOE},
    },
    "trained": {"everything": {}, "first layer and embedding frozen": {}, "norms alone": {}, "adapters on a frozen base": {}},
    "run": {"whole": {}, "stopped and resumed": {}, "another recipe from step 3 on": {}},
    "batch": {"one micro-batch": {"train": {"global_batch_size": 4, "micro_batch_size": 2}}, "two": {"train": {"global_batch_size": 8}}, "four": {"train": {"global_batch_size": 16}}},
}  # fmt: skip
MUON = {"optimizer": {"optimizer": "muon", "lr": 1e-2}}
WIDE = {"optimizer": MUON["optimizer"] | {"muon_fp32_matmul_prec": "highest", "muon_use_nesterov": True}}
LORA = {"model": {"lora_rank": 4, "lora_alpha": 8.0, "share_embeddings_and_output_weights": False}}
FROZEN = {"frozen": ["*"]}
HYBRID = {
    "model": {
        "num_layers": 4, "hybrid_override_pattern": "M-M*", "normalization": "RMSNorm", "position_embedding_type": "none", "mamba_num_heads": 16,
        "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 28,
    }
}  # fmt: skip
MIXERS = {"model": LORA["model"] | HYBRID["model"] | {"lora_targets": ["mixer.in_proj", "mixer.out_proj", "mlp.*"]}}
MODELS = 1_000_000
"""Runs from this number on have parameters with roles of their own."""
OF_MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "Muon": ("fp32_params_bf16_compute", "fsdp2", MUON),
    "Muon, FP32": ("fp32", "fsdp2", {"optimizer": MUON["optimizer"] | {"muon_use_nesterov": True}}),
    "megatron-core's Muon": ("bf16", "mcore", MUON),
    "megatron-core's Muon in FP32": ("bf16", "mcore", WIDE),
    "megatron-core's Muon on a hybrid": ("bf16", "mcore", MUON | HYBRID),
    "adapters": ({"recipe": "bf16_mixed", **FROZEN}, "mcore", LORA),
    "FP32 adapters": ({"recipe": "bf16_mixed", "lora_dtype": "fp32", **FROZEN}, "mcore", LORA),
    "adapters, tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **ALL, **FROZEN}, "mcore", LORA),
    "FP32 adapters, MXFP8": ({"recipe": "bf16_with_mxfp8_mixed", "lora_dtype": "fp32", **ALL, **FROZEN}, "mcore", LORA),
    "adapters, NVFP4": ({"recipe": "bf16_with_nvfp4_mixed", **ALL, **FROZEN}, "mcore", LORA),
    "adapters on a hybrid": ({"recipe": "bf16_mixed", "lora_dtype": "fp32", **FROZEN}, "mcore", MIXERS),
    "hybrid": ("bf16", "mcore", HYBRID),
    "hybrid, A_log, D and dt_bias in FP32": ({"recipe": "bf16_mixed", "keep_fp32": ["*.A_log", "*.D", "*.dt_bias"]}, "mcore", HYBRID),
    "hybrid, tensorwise": ({"recipe": "bf16_with_fp8_current_scaling_mixed", **ALL}, "mcore", HYBRID),
    "hybrid, MXFP8": ({"recipe": "bf16_with_mxfp8_mixed", **ALL}, "mcore", HYBRID),
    "hybrid, NVFP4": ({"recipe": "bf16_with_nvfp4_mixed", **ALL}, "mcore", HYBRID),
}  # fmt: skip
_SHARED = ("wrapper", "rates", "run", "batch")
AXES_OF_MODELS: dict[str, dict[str, dict[str, Any]]] = {name: AXES[name] for name in _SHARED} | {
    "optimizer": {"as it is": {}, "no clipping": {"optimizer": {"clip_grad": 0.0}}, "tight clipping": {"optimizer": {"clip_grad": 0.05}}, "no decay": {"optimizer": {"weight_decay": 0.0}}},
    "processes": {"1": {}, "2, data": {}},
    "trained": {"everything": {}},
}  # fmt: skip
_OFTEN = {"processes": (6, 2, 1, 1, 1, 1), "trained": (6, 1, 1, 2), "run": (3, 2, 1)}


def drawn(number: int) -> dict[str, str]:
    """Axis -> value of that run."""
    draw = random.Random(SEED * 100_000 + number)
    models = number >= MODELS
    found = {"recipe": draw.choice(list(OF_MODELS if models else RECIPES))}
    for axis, values in (AXES_OF_MODELS if models else AXES).items():
        often = _OFTEN.get(axis, ())[: len(values)]
        found[axis] = draw.choices(list(values), often or None)[0]
    return found if models else possible(found)


def possible(found: dict[str, str]) -> dict[str, str]:
    """The same without what no run can be: Megatron-FSDP refuses frozen parameters, a checkpoint stacks the layers of a model and needs the states of all of them."""
    if found["recipe"] == "Megatron-FSDP":
        found["trained"] = "everything"
    if found["recipe"] == "autocast" and found["model"] == "recomputed":
        found["model"] = "plain"  # megatron-core recomputes outside of autocast: the audit rightly names it
    if found["trained"].startswith("first"):  # a recipe changes by way of a checkpoint, too
        found["run"] = "whole"
    if found["trained"].startswith("adapters") and found["processes"] in ("2, tensor", "2, sequence"):
        found["trained"] = "norms alone"  # the adapters here are not split
    return found


def ranks(number: int) -> int:
    """Number of processes of that run."""
    return int(drawn(number)["processes"][0])


def container(folder: Path, choice: dict[str, str]) -> Any:
    """The run's configuration."""
    from tests.training.tiny import tiny

    models = choice["recipe"] in OF_MODELS
    recipe, engine, own = OF_MODELS[choice["recipe"]] if models else (*RECIPES[choice["recipe"]], {})
    if choice["run"].startswith("another recipe"):
        other: dict[str, Any] = (
            {"recipe": "bf16_mixed"}
            if choice["recipe"] != "bf16"
            else {"recipe": "bf16_with_fp8_current_scaling_mixed", **ALL}
        )
        first = recipe if isinstance(recipe, dict) else {"recipe": recipe}
        recipe = [first | {"until": 2}, other | FROZEN if "adapters" in choice["recipe"] else other]
    sections: dict[str, dict[str, Any]] = {
        "train": {"train_iters": STEPS, "eval_interval": 2, "eval_iters": 1, "log_interval": 1, "audit": "warn"},
        "model": {"add_bias_linear": False, "position_embedding_type": "rope"},
        "optimizer": {"lr": 1e-3, "clip_grad": 1.0, "weight_decay": 0.01},
        "audit": {"every": 1 + sum(map(len, choice.values())) % 2},
        "logger": {"progress": False},
    }
    if choice["run"].startswith("stopped"):
        sections["checkpoint"] = {"save": str(folder / "saved"), "save_interval": 2, "async_save": False}
    drawn_sections = [own]
    for axis, values in (AXES_OF_MODELS if models else AXES).items():
        if axis != "wrapper" or engine == "mcore":
            drawn_sections.append(values[choice[axis]])
    for one in drawn_sections:
        for name, more in one.items():
            sections[name] = sections.get(name, {}) | more
    made = tiny(folder, recipe, engine=engine, **sections)
    made.emulate = "tensorwise" in str(recipe) or any(word in str(recipe) for word in ("fp8", "nvfp4"))
    return made


@contextmanager
def changed_model(kind: str) -> Iterator[None]:
    """Models of this process train as `kind` of the axis 'trained' says."""
    import torch

    from mpbridge.backend.models import gpt

    real = gpt.gpt_model

    def frozen(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        for name, parameter in model.named_parameters():
            copied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
            first = "layers.0." in name or "embedding" in name or copied
            parameter.requires_grad_(
                not first if kind.startswith("first") else "norm" in name and kind == "norms alone"
            )
        if kind.startswith("adapters"):
            for name, module in list(model.named_modules()):
                if name.endswith(("linear_qkv", "linear_fc2")):
                    module.adapter = Adapter(module.weight)
                    module.register_forward_hook(add)
        # a recomputed layer has gradients only if its input does
        if hasattr(model, "embedding") and not model.embedding.word_embeddings.weight.requires_grad:
            model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
        return model

    class Adapter(torch.nn.Module):
        """A product of two small matrices; the second one starts at zero, as LoRA's does."""

        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            out, into = weight.shape
            self.a = torch.nn.Parameter(torch.randn(4, into) / into**0.5)
            self.b = torch.nn.Parameter(torch.zeros(out, 4))
            for one in (self.a, self.b):
                one.allreduce = getattr(weight, "allreduce", True)  # experts apart are averaged over ranks of their own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(self.a.dtype) @ self.a.t() @ self.b.t()

    def add(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + module.adapter(args[0]).to(output[0].dtype), *output[1:])

    if kind == "everything":
        yield
        return
    gpt.gpt_model = frozen
    try:
        yield
    finally:
        gpt.gpt_model = real


def outcome(number: int) -> dict[str, Any]:
    """One run: what its audits named; refused: a rule forbids the combination before anything is built."""
    import torch.distributed as dist

    from mpbridge.common.errors import Contradiction, Refused

    choice = drawn(number)
    holder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    shared = [holder.name if holder else ""]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    try:
        made = container(folder, choice)
        try:
            run = made.resolved(world_size=dist.get_world_size())
        except (Contradiction, Refused) as error:
            return {"ran": False, "refused": True, "drawn": choice, "why": str(error)[:300]}
        return finished(run, made, choice)
    finally:
        dist.barrier()  # the other rank may still read from the folder
        if holder is not None:
            holder.cleanup()


def finished(run: Any, made: Any, choice: dict[str, str]) -> dict[str, Any]:
    import torch

    from mpbridge.common.errors import Contradiction, Refused
    from mpbridge.training.base import Hook
    from mpbridge.training.loop import pretrain

    class Begun(Hook):
        """Whether an engine was built: what stops a run after that is no rule."""

        def __init__(self) -> None:
            self.built_one = False

        def built(self, training: Any) -> None:
            self.built_one = True

    begun, world = Begun(), torch.distributed.get_world_size()
    train: Callable[[Any], Any] = lambda this: pretrain(this, hooks=[begun], quiet=True)  # noqa: E731
    try:
        with changed_model(choice["trained"]):
            if choice["run"].startswith("stopped"):
                made.train.exit_interval = 2
                train(made.resolved(world_size=world))
                made.train.exit_interval = None
                made.checkpoint.load = made.checkpoint.save
                train(made.resolved(world_size=world))
            else:
                train(run)
    except (Contradiction, Refused) as error:
        if begun.built_one:
            raise
        return {"ran": False, "refused": True, "drawn": choice, "why": str(error)[:300]}
    history = json.loads((Path(run.logger["log_dir"]) / "precision.json").read_text())["audit"]["history"]
    faults = [f"step {one['step']} ({one['reason']}): {text}" for one in history for text in one.get("faults", ())]
    live = sum(one["stage"] == "live" for one in history)
    return {"ran": True, "drawn": choice, "audits": live, "faults": faults[:6]}
