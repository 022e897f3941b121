"""A run's configuration: plain data in layers, checked against a schema of the installed megatron-core without importing it."""
