"""Parts shared by the cores whose state is a matrix, `linear_attention` and `delta_rule`."""
