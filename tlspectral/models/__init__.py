"""A model as it is read: loading it, one view of its attention layers, the same view from its files."""
