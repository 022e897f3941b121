"""What went wrong with a run: reads its files together and finds the first anomalous step and tensors, and causes with their evidence. Loads no framework."""
