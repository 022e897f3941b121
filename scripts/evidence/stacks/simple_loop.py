"""Megatron-LM's examples/run_simple_mcore_train_loop.py under mpbridge's recipes, compared with mpbridge's own loop, loss by loss.

    python scripts/evidence/stacks/simple_loop.py CHECKOUT [--steps 200] [--recipes bf16_mixed,fp16_mixed] [--worlds 1,2] [--show]

CHECKOUT: a clone of Megatron-LM. A copy of the example with the edits of EDITS is written into a temporary folder and run there with the
installed megatron-core, in one process and with tensor parallelism over two; then mpbridge.pretrain trains the same model from the same seed
on the same samples. Every loss must be the same number, bit for bit. --show prints the edited copy instead. Exit code 0 if all are equal.
Also needs psutil: the example ends with a checkpoint, and megatron-core's writer uses it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
sys.path[:] = [
    path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent
]  # names of packages
EXAMPLE = "examples/run_simple_mcore_train_loop.py"
STEPS, SEED, BATCH, LENGTH = 200, 123, 8, 64


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement in the example: its purpose, and the text before and after."""

    kind: str
    """recipe: what mpbridge is for; machine: replaces hard-coded NCCL and CUDA; compare: makes two loops comparable."""
    why: str
    before: str
    after: str


EDITS = (
    Edit(
        "recipe",
        "mpbridge",
        "import os\nimport torch\nfrom torch.optim import Adam\n",
        "import atexit\nimport contextlib\nimport os\nimport sys\nimport mpbridge\nimport torch\n",
    ),
    Edit(
        "recipe",
        "the recipe is written onto the three configs before the model is built",
        "    gpt_model: GPTModel = GPTModel(\n",
        "    policy = mpbridge.resolve(mpbridge.get_mixed_precision_config(sys.argv[1]))\n"
        "    plan = mpbridge.plan(policy, model=transformer_config, optimizer=optimizer_config, ddp=ddp_config)\n"
        "    mpbridge.apply(plan)\n\n"
        "    gpt_model: GPTModel = GPTModel(\n",
    ),
    Edit(
        "recipe",
        "model_provider takes the other two configs and also returns the plan",
        "def model_provider() -> GPTModel:\n",
        "def model_provider(optimizer_config, ddp_config):\n",
    ),
    Edit("recipe", "", "    return gpt_model\n\n\ndef get_train", "    return gpt_model, plan\n\n\ndef get_train"),
    Edit(
        "recipe",
        "megatron-core's optimizer, which reads main_grad: torch's Adam never sees those gradients",
        "    gpt_model: GPTModel = model_provider()\n",
        "    optimizer_config = OptimizerConfig(optimizer='adam', lr=1e-3, weight_decay=0.0, clip_grad=0.0)\n"
        "    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)\n"
        "    gpt_model, plan = model_provider(optimizer_config, ddp_config)\n",
    ),
    Edit(
        "recipe",
        "",
        "from megatron.core.distributed import DistributedDataParallel\n",
        "from megatron.core.optimizer import OptimizerConfig\n",
    ),
    Edit(
        "recipe",
        "wrap wraps the model in Float16Module and DistributedDataParallel and creates the optimizer with main weights and loss scaling",
        "    config: TransformerConfig = gpt_model.config\n"
        "    ddp_config: DistributedDataParallelConfig = DistributedDataParallelConfig(\n"
        "        grad_reduce_in_fp32=False,\n        overlap_grad_reduce=False,\n        use_distributed_optimizer=False,\n    )\n"
        "    gpt_model = DistributedDataParallel(\n        config=config,\n        ddp_config=ddp_config,\n        module=gpt_model,\n    )\n\n"
        "    optim: Adam = Adam(gpt_model.parameters())\n",
        "    gpt_model, optim = mpbridge.wrap(gpt_model, plan, optimizer_config)\n",
    ),
    Edit(
        "recipe",
        "the gradient buffers are zeroed before each step",
        "        optim.zero_grad()\n",
        "        gpt_model.zero_grad_buffer()\n        optim.zero_grad()\n",
    ),
    Edit(
        "recipe",
        "megatron-core's schedule reduces the gradients through the hook that wrap installed; a second call would reduce them again",
        "        finalize_model_grads([gpt_model])\n",
        "",
    ),
    Edit(
        "machine",
        "a CPU if there is no GPU, with an Adam that computes like CUDA's fused one",
        'if __name__ == "__main__":\n    initialize_distributed(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)\n',
        'if __name__ == "__main__":\n    layer = contextlib.ExitStack()\n    layer.enter_context(device_layer(torch.cuda.is_available(), fused_adam=CpuFusedAdam))\n'
        "    atexit.register(layer.close)\n"
        '    initialize_distributed(int(os.environ["WORLD_SIZE"]), pipeline_model_parallel_size=1)\n',
    ),
    Edit(
        "machine",
        "",
        "from torch.utils.data import DataLoader\n",
        "from torch.utils.data import DataLoader\nfrom mpbridge.backend.devices import device_layer\n"
        "from mpbridge.backend.engines.optimizers import CpuFusedAdam\n",
    ),
    Edit("machine", "", 'backend="nccl"', 'backend="nccl" if torch.cuda.is_available() else "gloo"'),
    Edit(
        "machine",
        "",
        'torch.device("cuda")\n',
        'torch.device("cuda" if torch.cuda.is_available() else "cpu")\n',
    ),
    Edit(
        "machine",
        "a fused softmax is a CUDA kernel",
        "        use_cpu_initialization=True,\n",
        "        use_cpu_initialization=True,\n        masked_softmax_fusion=torch.cuda.is_available(),\n",
    ),
    Edit(
        "machine",
        "the installed megatron-core includes compiled helpers",
        "    if torch.distributed.is_available() and torch.distributed.is_initialized():\n"
        "        if torch.distributed.get_rank() == 0:\n            compile_helpers()\n        torch.distributed.barrier()\n"
        "    else:\n        compile_helpers()\n\n",
        "",
    ),
    Edit(
        "machine",
        "the tokenizer's name in megatron-core 0.16",
        '"null-text"',
        '"null" if megatron.core.__version__.startswith("0.16") else "null-text"',
    ),
    Edit(
        "machine",
        "",
        "from megatron.core.tokenizers import MegatronTokenizer\n",
        "from megatron.core.tokenizers import MegatronTokenizer\nimport megatron.core\n",
    ),
    Edit(
        "compare",
        "seeded weights and sample order, no dropout",
        "    model_parallel_cuda_manual_seed(123)\n",
        f"    model_parallel_cuda_manual_seed({SEED})\n    torch.manual_seed({SEED})\n",
    ),
    Edit("compare", "", "shuffle=True)", f"shuffle=True, generator=torch.Generator().manual_seed({SEED}))"),
    Edit(
        "compare",
        "megatron-core's own attention in both loops: with an FP32 softmax on a CPU, mpbridge uses a faster one that rounds at other places",
        "        pipeline_dtype=torch.float32,\n",
        "        hidden_dropout=0.0,\n        attention_dropout=0.0,\n        attention_softmax_in_fp32=False,\n",
    ),
    Edit("compare", "more steps, and every digit of the losses", "range(5)", "range(int(sys.argv[2]))"),
    Edit(
        "compare",
        "",
        '        print(f"Iteration {iteration}: Losses reduced: {losses_reduced}")\n',
        '        print("loss", float(losses_reduced[0]["lm loss"]).hex(), flush=True)\n',
    ),
)


def edited(checkout: Path) -> str:
    """The example with every edit applied. Raises SystemExit for an edit whose text does not occur exactly once."""
    text = (checkout / EXAMPLE).read_text(encoding="utf-8")
    for edit in EDITS:
        if text.count(edit.before) != 1:
            raise SystemExit(f"{EXAMPLE}: expected once, found {text.count(edit.before)} times:\n{edit.before}")
        text = text.replace(edit.before, edit.after)
    return text


def ranks(command: list[str], world: int, folder: Path) -> str:
    """The output of rank 0 of `world` processes, after all have ended. Raises SystemExit with the output of a process that fails."""
    from mpbridge.common.probe import free_port

    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    common |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate()[0] for process in started]
    for process, text in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{text[-3000:]}")
    return said[0]


def losses(text: str) -> list[str]:
    """The losses that a run printed, as hexadecimal floats."""
    return [line.split()[1] for line in text.splitlines() if line.startswith("loss ")]


def samples(copy: Path) -> Iterator[dict[str, Any]]:
    """The samples of the copy's own train iterator, one by one."""
    spec = importlib.util.spec_from_file_location("edited_example", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for batch in module.get_train_data_iterator():
        for index in range(BATCH):
            yield {name: batch[name][index] for name in ("tokens", "labels", "loss_mask", "position_ids")}


def own_loop(copy: Path, recipe: str, steps: int, world: int) -> None:
    """mpbridge's loop on the example's model and samples; prints like the copy."""
    from mpbridge import ConfigContainer, pretrain
    from mpbridge.training.base import Hook

    class Losses(Hook):
        def stepped(self, training: Any, result: Any) -> None:
            if os.environ["RANK"] == "0":
                print("loss", result.loss.hex(), flush=True)

    class Samples:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return samples(copy)

    config = ConfigContainer(
        mixed_precision=recipe,
        model={
            "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "vocab_size": 100, "max_sequence_length": LENGTH,
            "position_embedding_type": "learned_absolute", "tensor_model_parallel_size": world, "use_cpu_initialization": True,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False,
            "attention_softmax_in_fp32": False,
        },
        optimizer={"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0},
        scheduler={"lr_decay_style": "constant"},
        ddp={"use_distributed_optimizer": False, "overlap_grad_reduce": False},
        train={"train_iters": steps, "micro_batch_size": BATCH, "global_batch_size": BATCH, "seed": SEED, "eval_interval": None},
        data={"seq_length": LENGTH},
    )  # fmt: skip
    pretrain(config.resolved(world), dataset=Samples(), hooks=[Losses()], quiet=True)


def compared(copy: Path, recipe: str, steps: int, world: int) -> bool:
    """Prints a row; returns whether both loops print the same losses."""
    here = [sys.executable, str(Path(__file__).resolve())]
    theirs = losses(ranks([sys.executable, str(copy), recipe, str(steps)], world, copy.parent))
    ours = losses(ranks([*here, "--own", str(copy), recipe, str(steps), str(world)], world, copy.parent))
    equal = sum(one == other for one, other in zip(theirs, ours, strict=False))
    first, last = float.fromhex(theirs[0]), float.fromhex(theirs[-1])
    how = "1 process" if world == 1 else f"TP {world}"
    print(f"{recipe:12} {how:10} {first:.6f} -> {last:.6f}  equal {equal} of {steps}", flush=True)
    return equal == steps == len(theirs) == len(ours)


def main() -> int:
    """The command line of this script."""
    if sys.argv[1:2] == ["--own"]:
        own_loop(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return 0
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--recipes", default="bf16_mixed,fp16_mixed")
    arguments.add_argument("--worlds", default="1,2")
    arguments.add_argument("--show", action="store_true", help="print the edited copy and run nothing")
    args = arguments.parse_args()
    text = edited(args.checkout)
    if args.show:
        print(text)
        return 0
    if importlib.util.find_spec("psutil") is None:
        print(
            "the example ends with a checkpoint of megatron-core's own writer, which waits for ever without psutil: pip install psutil"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run_simple_mcore_train_loop.py"
        copy.write_text(text, encoding="utf-8")
        alike = [
            compared(copy, recipe, args.steps, int(world))
            for recipe in args.recipes.split(",")
            for world in args.worlds.split(",")
        ]
    print(json.dumps({"compared": len(alike), "equal": sum(alike)}))
    return 0 if all(alike) else 1


if __name__ == "__main__":
    raise SystemExit(main())
