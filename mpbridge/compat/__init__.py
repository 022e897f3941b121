"""Other projects' APIs on top of this registry and sync, for scripts that were written for them."""
