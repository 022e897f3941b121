"""Compares the table of precision settings in mpbridge/interop/stacks/words.py with live tensors of each stack's own loop.

    torchrun --nproc-per-node 2 scripts/evidence/witness_stacks.py [--only STACK] [--json FILE]

Every case is a training step of the real package on a CPU: accelerate's Accelerator, transformers' Trainer, Lightning's Trainer and Fabric, DeepSpeed's
engine, torch's FSDP2, megatron-core's objects as Megatron-LM's flags configure them. Stacks that are not installed are skipped with a message.
Exits with 1 if live tensors and the table disagree.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist

from mpbridge.interop.stacks.meaning import LABELS, rows
from mpbridge.interop.stacks.words import TABLE
from mpbridge.observe.audit.findings import Finding
from mpbridge.observe.witnessing.callbacks import FabricWitness, lightning_callback, trainer_callback
from mpbridge.observe.witnessing.report import Witnessed
from scripts.evidence import witness_deepspeed, witness_megatron, witness_sharded
from scripts.evidence.witness_common import (
    BF16,
    VOCABULARY,
    Case,
    Net,
    accelerated,
    adam,
    lightning_module,
    together,
    tokens,
    two_steps,
)

COMPARED = tuple(row for row in LABELS if row not in ("quantization", "loss_scale"))


# --- accelerate --------------------------------------------------------------------------------------------------------------------------------
def accelerate(model: Any, word: str = "bf16", **how: Any) -> Witnessed:
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision=word, cpu=True, gradient_accumulation_steps=2, **how)
    if "fsdp_plugin" in how:
        # accelerate silently ignores the plugin on a CPU, although its FSDP code runs there
        how["fsdp_plugin"].set_mixed_precision(word)
        accelerator.state.fsdp_plugin = how["fsdp_plugin"]
        # every AcceleratorState() that it creates later copies this one
        for state in (accelerator.state.__dict__, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
            state["device"] = torch.device("cpu")  # FSDP1 treats cpu:0 as a different device
    if "fsdp_plugin" in how and how["fsdp_plugin"].fsdp_version == 1:
        model = accelerator.prepare(model)  # this replaces its parameters, which the optimizer needs
        return accelerated(accelerator, model, accelerator.prepare(adam(model)))
    return accelerated(accelerator, *accelerator.prepare(model, adam(model)))


def accelerate_fsdp(version: int) -> Witnessed:
    """FSDP1 or FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, cpu_offload=False, auto_wrap_policy="size_based_wrap", min_num_params=10**9
    )
    return accelerate(Net(), fsdp_plugin=plugin)


# --- transformers ------------------------------------------------------------------------------------------------------------------------------
def transformers_trainer(dtype: Any = None) -> Witnessed:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    with tempfile.TemporaryDirectory() as mine:
        folder = together(mine)
        if dtype is not None:  # like loading a checkpoint in that dtype; only the first rank writes it
            model.to(dtype).save_pretrained(folder)
            if dist.is_initialized():
                dist.barrier()
            model = LlamaForCausalLM.from_pretrained(folder)
        follows = trainer_callback(at={2})
        arguments = TrainingArguments(
            output_dir=folder,
            bf16=True,
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": tokens(i)[0], "labels": tokens(i)[0]} for i in range(16)]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[follows]).train()
    return follows.report


# --- Lightning ---------------------------------------------------------------------------------------------------------------------------------
def lightning_trainer(precision: str) -> Witnessed:
    import lightning.pytorch as pl

    follows = lightning_callback(at={2})
    size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        precision=precision,
        max_steps=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[follows],
    )
    trainer.fit(lightning_module(), torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (64, 8)), batch_size=4))
    return follows.report


def lightning_fabric(precision: str) -> Witnessed:
    from lightning.fabric import Fabric

    follows = FabricWitness(at={2})
    size = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        precision=precision,
        callbacks=[follows],
    )
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, adam(model))
    for step in range(2):
        fabric.call("on_train_batch_start", model=model, optimizer=optimizer)
        fabric.backward(model(tokens(step)))
        optimizer.step()
        optimizer.zero_grad()
        fabric.call("on_train_batch_end")
    return follows.report


# --- torch -------------------------------------------------------------------------------------------------------------------------------------
def fsdp2() -> Witnessed:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Net()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    return two_steps(model, adam(model))


def bf16_net() -> Net:
    return Net().to(BF16)


CASES = (
    *witness_megatron.CASES,
    *witness_sharded.CASES,
    *witness_deepspeed.CASES,
    Case("fsdp2", "MixedPrecisionPolicy with nothing else said, module in FP32", fsdp2, several=True),
    Case("accelerate", "one GPU or DDP, module in FP32", lambda: accelerate(Net())),
    Case("accelerate", "one GPU or DDP, module loaded in BF16", lambda: accelerate(bf16_net())),
    Case("accelerate", "module in FP32", lambda: accelerate(Net(), "no"), word="no"),
    Case("accelerate", "module loaded in BF16", lambda: accelerate(bf16_net(), "no"), word="no"),
    Case("accelerate", "FSDP2", lambda: accelerate_fsdp(2), several=True),
    Case("accelerate", "FSDP1", lambda: accelerate_fsdp(1), several=True),
    Case("transformers", "DDP, checkpoint in FP32", transformers_trainer),
    Case("transformers", "DDP, checkpoint in BF16 (its dtype is kept)", lambda: transformers_trainer(BF16)),
    Case("lightning", "one GPU or DDP", lambda: lightning_trainer("bf16-mixed"), word="bf16-mixed"),
    Case("lightning", "one GPU or DDP", lambda: lightning_trainer("bf16-true"), word="bf16-true"),
    Case("lightning", "everywhere", lambda: lightning_trainer("32-true"), word="32-true"),
    Case("lightning", "one GPU or DDP", lambda: lightning_fabric("bf16-mixed"), word="bf16-mixed"),
    Case("lightning", "one GPU or DDP", lambda: lightning_fabric("bf16-true"), word="bf16-true"),
)


def told(case: Case) -> dict[str, str]:
    """What the table says."""
    found = [row for row in TABLE if row.stack == case.stack and row.where == case.where and case.word in row.words]
    assert len(found) == 1, (case, len(found))
    return {name: text for name, text in rows(found[0].meaning).items() if name in COMPARED}


def different(case: Case, seen: Witnessed) -> dict[str, tuple[str, str]]:
    """Row -> (the table's, what was seen); without rows that one process cannot show."""
    described = seen.described
    found = {name: text for name, text in rows(described.meaning).items() if name not in described.unseen}
    return {name: (text, found[name]) for name, text in told(case).items() if name in found and found[name] != text}


def faults(case: Case, seen: Witnessed) -> list[Finding]:
    """The report's, without the one that is meant where the table says that the parameters are their own main weights."""
    own = told(case)["main"].startswith("none")
    return [one for one in seen.report.faults if not (own and one.subject == "main weights")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one stack")
    parser.add_argument("--json", type=Path, help="every report")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    out, wrong = {}, 0
    for case in CASES:
        if options.only and case.stack != options.only:
            continue
        name = f"{case.stack}: {case.word}, {case.where}"
        seen = run(case)
        if isinstance(seen, str):
            if first:
                print(f"-    {name}: skipped: {seen}")
            continue
        found = different(case, seen)
        odd = faults(case, seen)
        wrong += bool(found or odd)
        out[name] = seen.as_data() | {"differs": found}
        if first:
            show(name, seen, found, odd)
    if first and options.json:
        options.json.write_text(json.dumps(out, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if wrong else 0


def run(case: Case) -> Witnessed | str:
    """The report on a case, or why it was skipped."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if case.several and size < case.ranks:
        return f"it needs torchrun and {case.ranks} processes"
    try:
        return case.run()
    except ImportError as error:
        return str(error)


def show(name: str, seen: Witnessed, found: dict[str, tuple[str, str]], odd: list[Finding]) -> None:
    """Prints one case: its verdict, rows that differ from the table, faults."""
    print(f"{'NO' if found or odd else 'ok':<4} {name} ({seen.described.loop})")
    for row, (table, live) in found.items():
        print(f"       {LABELS[row]}: the table says {table}, live tensors say {live}")
    for fault in odd:
        print(f"       {fault}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
