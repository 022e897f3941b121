"""Other training stacks: interprets their precision settings, exports recipes to their configuration, and imports their files.

`meaning` is the neutral form in which all of them are compared, `words` the table of what one setting means in each stack, `exporters` and
`importers` find a stack by name. Loads no framework, and executes nothing from an imported file.
"""
