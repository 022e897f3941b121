"""The texts that `mpbridge init` writes."""

from __future__ import annotations

WHAT = {
    "config.yaml": "the run: model, optimizer, batches, data, checkpoints",
    "recipe.yaml": "its precision",
    "train.py": "the same run from Python, also under torchrun",
    "README.md": "the commands",
}
"""File -> what it is."""

SECTIONS = {
    "logger": """logger:
  log_dir: run # metrics, what was decided, what the audits found""",
    "checkpoint": """checkpoint:
  save: run/checkpoints
  load: run/checkpoints # the command that starts the run also resumes it
  save_interval: 50""",
}
"""Section -> its text, for configurations without it."""

RECIPE = """# Every field that a recipe may have: mpbridge show {recipe}
extends: {recipe}
# gradients in 16 bits on the wire:
# grad_reduce_in_fp32: false
# only the MLP's linears in FP8:
# modules:
#   mlp.*: {{fp8: hybrid, fp8_recipe: tensorwise}}
"""

SCRIPT = '''"""Trains what config.yaml says. `python train.py optimizer.lr=1e-3`; on two processes: `torchrun --nproc-per-node 2 train.py`."""

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

`data.corpus` names your own text in the place of what config.yaml reads: files or folders. `mpbridge list` has the recipes to put into recipe.yaml.
"""


def readme(*, target: str, settings: str, processes: int, log_dir: str, quantized: bool) -> str:
    """README.md of a starter folder.

    target: a machine that runs the recipe; settings: what config.yaml leaves to the user, each with a blank before it; processes: the smallest world.
    """
    run = f"train --config config.yaml{settings}"
    several = f"torchrun --nproc-per-node {max(2, processes)} -m mpbridge {run}"
    if processes > 8:
        several = f"mpbridge launch --nodes {-(-processes // 8)} --gpus-per-node 8 -- {run}"
    alone = [(f"mpbridge {run} train.train_iters=20", "train: settings stand after the options")]
    if "train.train_iters" in settings:
        alone = [(f"mpbridge {run}", "train: settings stand after the options")]
    commands = [
        (f"mpbridge plan --config config.yaml{settings}", "what the recipe writes to which field"),
        (f"mpbridge check --config config.yaml --target {target}{settings}", "is it legal there"),
        (f"mpbridge memory --config config.yaml --target {target}{settings}", "does it fit"),
        *(alone if processes == 1 else []),
        *(
            [(f"mpbridge {run} --emulate", "without such a GPU: its rounding, emulated")]
            if quantized and processes == 1
            else []
        ),
        (several, ""),
        (f"mpbridge audit {log_dir}", "what the audits of the run found"),
    ]
    width = max(len(command) for command, said in commands if said)
    lines = [f"{command:{width}}  # {said}" if said else command for command, said in commands]
    return README.format(commands="\n".join(lines))
