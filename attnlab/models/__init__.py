"""Models: inputs, stacks and heads, and what may be asked of any of them (`predictor.py`)."""
