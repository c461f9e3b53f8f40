"""One attention score as a sum of what was written into the residual stream."""
