"""Which linears may go low, measured on the user's own model: scores, a choice under a budget, its proof on unseen batches, and a recipe."""
