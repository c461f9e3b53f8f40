"""Circuits: the value of a task when only some edges carry the clean prompt, and estimates for all edges."""
