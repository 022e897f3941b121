"""Engines: what builds, shards, reduces and updates. `contract` says what each offers, `registry` finds one by name."""
