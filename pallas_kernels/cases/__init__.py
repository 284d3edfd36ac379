"""Named inputs of the cores, shared by tests and benchmarks: a module for each core, with its `CASES`.

`call(name)` makes arrays from a name, the same ones every time; `real()` are calls at model sizes, shapes only.
"""
