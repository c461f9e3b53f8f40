"""Settings of every test: nothing asks a model hub, and torch uses one thread, the faster choice on tiny matrices."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
