"""The number of tokens in a summed loss, intercepted where the schedule passes it to the gradients' finalization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(chunks: list[Any], note: Callable[[int], None]) -> Iterator[None]:
    """Calls `note` with this rank's number while the block runs. megatron-core's schedules pass it to `finalize_model_grads_func` if the config sets
    calculate_per_token_loss; that function sums over ranks, so the number is read before it."""
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
