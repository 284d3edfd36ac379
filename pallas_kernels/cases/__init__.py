"""Named inputs of the cores, shared by tests and benchmarks: a module for each core, with its `CASES`.

`call(name)` makes arrays from a name, the same ones every time; `real()` is a call of the size of a model, shapes only.
"""
