"""Which tensors a rank stores, how many and in which dtype: parameters, buffers, roles, activations, and their total in bytes. Loads no framework."""
