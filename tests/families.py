"""What becomes of a tiny model of every family: loaded, checked, compared with transformers' own model, and streamed."""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import transformers
from family_configs import tiny_config
from streamed_checkpoints import analyze, assert_streamed_equals_loaded
from torch import nn
from zoo import prompt

import tlspectral as tls
from tlspectral.errors import TlspectralError
from tlspectral.models.checkpoints import layers as streamed_layers

_QUERY_KEY = ("q_proj", "k_proj", "query", "key", "q_attn", "q_b_proj", "kv_b_proj")
_JOINT = ("query_key_value", "c_attn", "qkv_proj", "Wqkv", "attn_qkv")


@dataclass(frozen=True)
class Outcome:
    """What became of a form of a family: loaded and streamed, each with the reason where it is not reproduced."""

    loaded: str
    streamed: str
    reason: str


@torch.no_grad()
def jitter(model: nn.Module) -> None:
    """Move norms, biases and other vectors off their first values and enlarge query and key weights, in place."""
    for path, module in model.named_modules():
        kind = path.rsplit(".", 1)[-1]
        for name, value in module.named_parameters(recurse=False):
            if value.ndim == 1 or "norm" in type(module).__name__.lower():
                # A gain of queries and keys is enlarged: under such a norm the size of their weights does not matter.
                value += 0.3 * torch.randn_like(value) + 0.6 * (kind in ("q_norm", "k_norm"))
            elif kind in _QUERY_KEY:
                value *= 5
            elif kind in _JOINT:
                value *= 3


def save(model_type: str, form: dict[str, Any], folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(model_type, **form)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        jitter(model)
    model.save_pretrained(folder)
