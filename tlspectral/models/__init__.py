"""A model as it is read: loaded whole, or layer by layer from its files, with one view of its attention for both.

`loading` makes TransformerLens models of names and paths, `attention` reads the layers of a model, `checkpoints` reads
them from files of weights, and `opening` does one or the other.
"""
