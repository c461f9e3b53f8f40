"""Runs of a model: prompts as token ids, padding, text, and runs of some layers alone."""
