"""The scores of a head from its weights and from runs, their tolerances, and the attention pattern that they give."""
