"""The residual stream: the writes of heads and MLPs, and the input of each layer."""
