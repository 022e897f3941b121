"""Pure answers about a policy and a run: rules, machines, shapes, memory. Nothing here edits anything or loads a framework."""
