"""The texts that `mpbridge init` writes."""

from __future__ import annotations

WHAT = {
    "config.yaml": "the run: model, optimizer, batches, data, checkpoints",
    "recipe.yaml": "its precision",
    "train.py": "the same run from Python, also under torchrun",
    "README.md": "the commands",
}
"""File -> its description."""

SECTIONS = {
    "logger": """logger:
  log_dir: run # metrics, decisions and audit results""",
    "checkpoint": """checkpoint:
  save: run/checkpoints
  load: run/checkpoints # the command that starts the run also resumes it
  save_interval: 50""",
}
"""Section -> its text, for configurations that lack it."""

RECIPE = """# All fields of a recipe: mpbridge show {recipe}
extends: {recipe}
# gradients in 16 bits on the wire:
# grad_reduce_in_fp32: false
# only the MLP's linears in FP8:
# modules:
#   mlp.*: {{fp8: hybrid, fp8_recipe: tensorwise}}
"""

SCRIPT = '''"""Trains with config.yaml. `python train.py optimizer.lr=1e-3`; on two processes: `torchrun --nproc-per-node 2 train.py`."""

import os
import sys
from pathlib import Path

from mpbridge import ConfigContainer, pretrain

config = ConfigContainer.load(Path(__file__).with_name("config.yaml"), sys.argv[1:])
run = config.resolved(world_size=int(os.environ.get("WORLD_SIZE", "1")))

if __name__ == "__main__":
    pretrain(run)
'''

README = """# A run of mpbridge

```bash
{commands}
```

Set `data.corpus` to train on your own text (files or folders) instead of the data in config.yaml. `mpbridge list` shows the recipes that recipe.yaml can extend.
"""


def readme(*, target: str, settings: str, processes: int, log_dir: str, quantized: bool) -> str:
    """README.md of a starter folder.

    target: a machine that runs the recipe; settings: what config.yaml leaves to the user, each preceded by a blank; processes: the smallest world.
    """
    run = f"train --config config.yaml{settings}"
    several = f"torchrun --nproc-per-node {max(2, processes)} -m mpbridge {run}"
    if processes > 8:
        several = f"mpbridge launch --nodes {-(-processes // 8)} --gpus-per-node 8 -- {run}"
    alone = [(f"mpbridge {run} train.train_iters=20", "train: settings follow the options")]
    if "train.train_iters" in settings:
        alone = [(f"mpbridge {run}", "train: settings follow the options")]
    commands = [
        (f"mpbridge plan --config config.yaml{settings}", "which fields the recipe writes"),
        (f"mpbridge check --config config.yaml --target {target}{settings}", "is it valid there"),
        (f"mpbridge memory --config config.yaml --target {target}{settings}", "does it fit"),
        *(alone if processes == 1 else []),
        *(
            [(f"mpbridge {run} --emulate", "without such a GPU: emulate its rounding")]
            if quantized and processes == 1
            else []
        ),
        (several, ""),
        (f"mpbridge audit {log_dir}", "what the audits of the run found"),
    ]
    width = max(len(command) for command, said in commands if said)
    lines = [f"{command:{width}}  # {said}" if said else command for command, said in commands]
    return README.format(commands="\n".join(lines))
