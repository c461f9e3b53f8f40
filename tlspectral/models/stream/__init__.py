"""The residual stream: what heads and MLPs write to it, and what each layer reads from it."""
