"""Weights between folders in Hugging Face's layout and checkpoints of mpbridge, tensor by tensor; no model is built."""
