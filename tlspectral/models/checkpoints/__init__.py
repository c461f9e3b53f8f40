"""The attention layers of a checkpoint, read from its files one at a time, so that it may be larger than memory.

Only safetensors are opened. Each layer is put into a one-layer model of the checkpoint's own architecture. It is then
read by the same code as a loaded model, and its scores are checked the same way. Only the weights asked for are read.
"""
