"""Which tensors a rank keeps, in which dtype and how many: parameters, buffers, roles, activations, and the bytes they add up to. Loads no framework."""
