"""How many tokens a sum of losses was taken over, as the schedule hands the number to what finishes the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(chunks: list[Any], note: Callable[[int], None]) -> Iterator[None]:
    """Tells `note` this rank's number while the block runs. megatron-core's schedules give it to `finalize_model_grads_func` where the config says
    calculate_per_token_loss; the ranks' numbers are summed inside of it, so it is read before."""
    config = next((one.config for chunk in chunks for one in chunk.modules() if hasattr(one, "config")), None)
    real = getattr(config, "finalize_model_grads_func", None)
    if config is None or real is None or not getattr(config, "calculate_per_token_loss", False):
        yield
        return

    def finalize(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is not None:
            note(int(num_tokens))
        return real(model, num_tokens, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    try:
        yield
    finally:
        if config.finalize_model_grads_func is finalize:
            config.finalize_model_grads_func = real
