"""Saving and resuming a run: the fingerprint and the verdict, the folders on disk, the state independent of the recipe, saving and loading."""
