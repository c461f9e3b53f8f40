"""Heads, layers, receivers and parts, in every form in which users write them."""
