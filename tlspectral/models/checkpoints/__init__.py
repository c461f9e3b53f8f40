"""Read the attention layers of a checkpoint from its files, one at a time: it may be larger than memory.

Only safetensors are opened. A layer is put into a one-layer model of the checkpoint's own architecture, which is read
and checked by the same code as a loaded model. Only the weights that a measurement needs are read.
"""
