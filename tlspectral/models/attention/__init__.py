"""The scores of a head: from weights and from runs, what they allow in rounding, and the pattern they give."""
