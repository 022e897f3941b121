"""Folders in Hugging Face's layout: config.json as a model section and back, names and shapes of tensors. Executes nothing, loads no framework."""
