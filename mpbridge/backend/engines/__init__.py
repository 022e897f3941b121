"""Engines: build a model, shard it, reduce its gradients and update its weights. `contract` defines the interface, `registry` finds an engine by name."""
