"""Run a model: prompts as token ids, padding, text, and runs that compute only some layers."""
