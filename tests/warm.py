"""What `forked.py`'s server loads before the first test asks for a process."""

from __future__ import annotations

import gc
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

import mpbridge.backend.engines.parallel  # noqa: E402
import mpbridge.backend.models.gpt  # noqa: E402
import mpbridge.training.checkpoint.io  # noqa: E402
import mpbridge.training.loop  # noqa: E402, F401
import tests.training.survival  # noqa: E402, F401
from mpbridge.planning.rules.table import rules  # noqa: E402

torch.set_num_threads(1)
rules()
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # torch imports more with the first optimizer
gc.collect()
gc.freeze()
