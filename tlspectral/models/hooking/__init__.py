"""Hooks on a model: put on and taken off whole, also when a run breaks off, one thread at a time."""
