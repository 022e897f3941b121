"""What a run really does: the audit, the witness in any loop, statistics of low precision, and the diagnosis of a run."""
