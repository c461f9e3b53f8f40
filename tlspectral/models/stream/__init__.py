"""What heads and MLPs write to the residual stream, and what a layer reads from it."""
