"""Other training stacks: what their precision settings mean, a recipe written in their words, and their files read back.

`meaning` is the neutral statement that all of them are compared in, `words` the table of what one word means where, `exporters` and
`importers` find a stack by name. Loads no framework, and executes nothing of an imported file.
"""
