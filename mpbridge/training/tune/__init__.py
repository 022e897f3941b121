"""Which linears can run in low precision, measured on the user's own model: scores, a choice within a budget, its proof on unseen batches, a recipe."""
