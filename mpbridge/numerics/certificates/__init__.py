"""Certificates: what a recipe's rounding does to operands, GEMMs and the optimizer, computed without training."""
