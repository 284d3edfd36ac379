"""One block, one stack, one set of heads, one model."""
