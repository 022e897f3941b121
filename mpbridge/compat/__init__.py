"""Other projects' names over this registry and this sync, for scripts that were written for them."""
