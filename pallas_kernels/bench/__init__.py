"""Times the cores against what a user would run instead: `python -m pallas_kernels.bench --help`."""
