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
mpbridge plan --config config.yaml                        # what the recipe writes to which field
mpbridge check --config config.yaml --target h100         # is it legal there
mpbridge memory --config config.yaml --target h100        # does it fit
mpbridge train --config config.yaml train.train_iters=20  # train: settings stand after the options
torchrun --nproc-per-node 2 -m mpbridge train --config config.yaml
mpbridge audit run                                        # what the audits of the run found
```

`data.corpus` names your own text in the place of the Python library's: files or folders. `mpbridge list` has the recipes to put into recipe.yaml.
"""
