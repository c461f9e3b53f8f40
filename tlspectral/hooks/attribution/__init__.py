"""Attention scores and head outputs as sums over the writes of earlier components to the residual stream."""
