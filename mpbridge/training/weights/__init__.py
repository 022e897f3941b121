"""Converts weights between folders in Hugging Face's layout and mpbridge's checkpoints, tensor by tensor; no model is built."""
