"""What went wrong with a run: its files read together, the first step and tensors out of line, causes with their evidence. Loads no framework."""
