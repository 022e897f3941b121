"""What went wrong with a run: its files read together, the first anomalous step and tensors, causes with their evidence. Loads no framework."""
