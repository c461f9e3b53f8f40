"""Causal edges: what a receiver reads without a part of heads, their senders, and what that costs."""
