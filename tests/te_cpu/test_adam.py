"""The played kernels' Adam against adam.cu's formula: the moments too, since a weight hides a second moment that is a little off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpbridge.te_cpu import optimizers

BETAS, LR, EPS = (0.9, 0.999), 1e-2, 1e-8


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", [0, 1], ids=["L2", "decoupled"])
def test_weights_and_both_moments_are_those_of_the_formula(mode: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(3, 40_001, generator=generator) for _ in range(2))
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    before = [weight.double().numpy().copy(), *(np.zeros(weight.shape) for _ in range(2))]
    for step in (1, 2, 3):
        optimizers.multi_tensor_adam(0, None, [[grad], [weight], [m], [v]], LR, *BETAS, EPS, step, mode, 1, decay)
        # adam.cu: `const float beta`, and 1 - beta in float; the rest in double, as the reference of an FP32 result
        b1, b2 = (float(np.float32(beta)) for beta in BETAS)
        k1, k2 = (float(np.float32(1) - np.float32(beta)) for beta in BETAS)
        p, exp_avg, exp_avg_sq = before
        g = grad.double().numpy() + (decay * p if mode == 0 else 0)
        exp_avg, exp_avg_sq = b1 * exp_avg + k1 * g, b2 * exp_avg_sq + k2 * g * g
        update = exp_avg / (1 - b1**step) / (np.sqrt(exp_avg_sq / (1 - b2**step)) + EPS)
        before = [p - LR * (update + (decay * p if mode == 1 else 0)), exp_avg, exp_avg_sq]
        # each step rounds a handful of times to 2**-24; sums that cancel (the first moment, L2's gradient) lose relative to their terms
        terms = grad.double().abs().numpy() + decay * np.abs(p)
        for found, expected, size in zip((m, v), before[1:], (terms, k2 * terms**2), strict=True):
            assert np.all(
                np.abs(found.double().numpy() - expected) <= step * 4 * 2.0**-24 * np.maximum(np.abs(expected), size)
            )
        assert np.all(np.abs(weight.double().numpy() - before[0]) <= step * 8 * 2.0**-24 * (np.abs(before[0]) + 1))


def test_a_transposed_weight_is_updated_as_its_copy_is() -> None:
    results = []
    for plain in (True, False):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(5, 3, generator=generator).t() for _ in range(2)] + [
            torch.zeros(5, 3).t() for _ in range(2)
        ]
        weight, grad, m, v = (one.contiguous() if plain else one for one in tensors)
        optimizers.multi_tensor_adam(0, None, [[grad], [weight], [m], [v]], LR, *BETAS, EPS, 1, 1, 1, 0.1)
        results.append((weight, m, v))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
