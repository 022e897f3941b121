"""Predicts the time of a step: a list of the operations that a rank issues, priced with a few fitted constants. Loads no framework."""
