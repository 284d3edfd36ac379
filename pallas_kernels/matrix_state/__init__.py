"""What cores with a matrix for a state, `linear_attention` and `delta_rule`, share."""
