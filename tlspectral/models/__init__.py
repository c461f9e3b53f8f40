"""Models: loading them, reading their attention layers, and running them.

`loading` turns names and paths into TransformerLens models, `reading` reads the layers of a model, `checkpoints` reads
layers from files of weights, and `opening` does either for a measurement.
"""
