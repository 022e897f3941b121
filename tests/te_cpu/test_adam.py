"""The played kernels' Adam against adam.cu's formula: the moments too, since a weight hides a second moment that is a little off."""

import numpy as np
import pytest
import torch

from mpbridge.te_cpu import multi_tensor

BETAS, LR, EPS = (0.9, 0.999), 1e-2, 1e-8


UNIT = 2.0**-24
"""FP32 rounds by at most this, relative to the result."""


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", [0, 1], ids=["L2", "decoupled"])
def test_weights_and_both_moments_are_those_of_the_formula(mode: int, decay: float) -> None:
    """In float64, with the error of each FP32 result carried from operation to operation: what cancels keeps the error of its terms."""
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(3, 40_001, generator=generator) for _ in range(2))
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    p, exp_avg, exp_avg_sq = weight.double().numpy().copy(), *(np.zeros(weight.shape) for _ in range(2))
    dp, dm, dv = (np.zeros(weight.shape) for _ in range(3))
    # adam.cu: `const float beta`, and 1 - beta in float
    b1, b2, lr, decay32 = (float(np.float32(value)) for value in (*BETAS, LR, decay))
    k1, k2 = (float(np.float32(1) - np.float32(beta)) for beta in BETAS)
    for step in (1, 2, 3):
        multi_tensor.multi_tensor_adam(0, None, [[grad], [weight], [m], [v]], LR, *BETAS, EPS, step, mode, 1, decay)
        g, dg = grad.double().numpy(), np.zeros(weight.shape)
        if mode == 0:
            term = decay32 * p
            g, dg = g + term, decay32 * dp + UNIT * (np.abs(term) + np.abs(g + term))
        dm = b1 * dm + k1 * dg + UNIT * (np.abs(b1 * exp_avg) + np.abs(k1 * g))
        dv = b2 * dv + k2 * (2 * np.abs(g) + dg) * dg + UNIT * (b2 * exp_avg_sq + 2 * k2 * g * g)
        exp_avg, exp_avg_sq = b1 * exp_avg + k1 * g, b2 * exp_avg_sq + k2 * g * g
        dm, dv = dm + UNIT * np.abs(exp_avg), dv + UNIT * exp_avg_sq
        first, second = exp_avg / (1 - b1**step), np.sqrt(exp_avg_sq / (1 - b2**step))
        # the difference of two roots is at most the root of the difference
        spread = np.minimum(dv / (1 - b2**step) / np.maximum(second, 1e-300), np.sqrt(dv / (1 - b2**step)))
        update = first / (second + EPS)
        lowest = np.maximum(second - spread, 0) + EPS
        # six roundings: both corrections and quotients by them, the root, the sum with eps and the quotient, of which two enter by a root
        apart = (dm / (1 - b1**step) + np.abs(update) * spread) / lowest + 6 * UNIT * np.abs(update)
        if mode == 1:
            update = update + decay32 * p
            apart += decay32 * dp + UNIT * (np.abs(decay32 * p) + np.abs(update))
        p = p - lr * update
        dp = dp + lr * apart + UNIT * (np.abs(lr * update) + np.abs(p))
        # errors of errors: 1e-3 is far more than their share
        for found, expected, bound in ((m, exp_avg, dm), (v, exp_avg_sq, dv), (weight, p, dp)):
            assert np.all(np.abs(found.double().numpy() - expected) <= 1.001 * bound)
        assert np.median(dp / np.abs(lr * update)) < 2e-3  # an update with another factor is far beyond it


def test_a_transposed_weight_is_updated_as_its_copy_is() -> None:
    results = []
    for plain in (True, False):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(5, 3, generator=generator).t() for _ in range(2)] + [
            torch.zeros(5, 3).t() for _ in range(2)
        ]
        weight, grad, m, v = (one.contiguous() if plain else one for one in tensors)
        multi_tensor.multi_tensor_adam(0, None, [[grad], [weight], [m], [v]], LR, *BETAS, EPS, 1, 1, 1, 0.1)
        results.append((weight, m, v))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
