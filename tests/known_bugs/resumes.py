"""Bugs of loading: a short run is saved, and resumed by a loader with the bug."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mpbridge import ConfigContainer, pretrain
from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.common.errors import CheckpointError
from mpbridge.numerics.scales import AmaxTable
from mpbridge.training.checkpoint import io
from tests.backend.engines import tiny

DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
Wrap = Callable[[Any], Any]


def trained(recipe: str, steps: int, wrap: tuple[Any, str, Wrap] | None = None, **checkpoint: Any) -> float:
    """The last loss of a run. wrap: (owner, method, a function of the real one) while it runs."""
    config = ConfigContainer(
        mixed_precision=recipe,
        emulate=recipe == DELAYED,
        model=tiny.MODEL | {"vocab_size": 384},
        optimizer={"lr": 1e-3},
        scheduler={"override_opt_param_scheduler": True},
        ddp={"use_distributed_optimizer": True},
        data={"corpus": "stdlib", "seq_length": tiny.SEQ},
        train={"micro_batch_size": 2, "global_batch_size": 2, "train_iters": steps, "eval_iters": 0},
        checkpoint=checkpoint,
    )
    owner, method, change = wrap or (McoreEngine, "load_state", lambda real: real)
    with patch.object(owner, method, change(getattr(owner, method))), redirect_stdout(StringIO()):
        return float(pretrain(config.resolved()).last_loss)


@cache
def saved(recipe: str) -> tuple[str, float]:
    """(folder of a run of two steps, the last loss of its healthy continuation)."""
    folder = tempfile.mkdtemp(prefix="mpbridge-known-")
    trained(recipe, 2, save=folder, save_interval=2)
    return folder, trained(recipe, 4, load=folder)


def main_weights_rounded(real: Any) -> Any:
    def load_state(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for one in group["params"]:
                    one.data.copy_(one.data.bfloat16().float())

    return load_state


def moments_left_behind(real: Any) -> Any:
    """A tensor's key counts as loaded, but what was filled is a copy."""

    def load_state(self: Any, *args: Any, **kwargs: Any) -> None:
        states = [state for part in self.optimizer.chained_optimizers for state in part.optimizer.state.values()]
        kept = [state["exp_avg"].clone() for state in states]
        real(self, *args, **kwargs)
        states = [state for part in self.optimizer.chained_optimizers for state in part.optimizer.state.values()]
        states[0]["exp_avg"].copy_(kept[0])

    return load_state


def play(recipe: str, owner: Any, method: str, wrap: Wrap) -> str:
    folder, healthy = saved(recipe)
    with patch.object(io, "different", lambda given, engine: []):
        assert trained(recipe, 4, (owner, method, wrap), load=folder) != healthy
    try:
        trained(recipe, 4, (owner, method, wrap), load=folder)
    except CheckpointError as error:
        return str(error).replace(str(Path(folder)), "FOLDER")
    return ""


PLAYS: dict[str, Callable[[], str]] = {
    "main weights rounded": cache(partial(play, "bf16_mixed", McoreEngine, "load_state", main_weights_rounded)),
    "moments left behind": cache(partial(play, "bf16_mixed", McoreEngine, "load_state", moments_left_behind)),
    "amax history lost": cache(partial(play, DELAYED, AmaxTable, "load_state", lambda real: lambda self, state: None)),
}
