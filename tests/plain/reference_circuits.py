"""Circuits of zoo models as dense d x d matrices on Hugging Face's own weights, and bridges with weights changed."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
import zoo

NAMES = ("gpt2", "neox", "llama", "qwen3", "gemma3")  # LayerNorm twice, RMS with grouped keys, q/k norm, gain 1 + w


@dataclass(frozen=True)
class DenseLayer:
    """A layer's factors, folded by dense matrices: [heads, d_model, d_head], and w_o [heads, d_head, d_model]."""

    w_q: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    w_o: np.ndarray
    centring: np.ndarray

    @property
    def qk(self):
        """M, [heads, d_model, d_model]."""
        return self.w_q @ self.w_k.transpose(0, 2, 1)

    @property
    def ov(self):
        """W_V W_O, written without its mean under LayerNorm."""
        return self.w_v @ self.w_o @ self.centring


@dataclass(frozen=True)
class DenseModel:
    """Layers, W_E as stored [vocabulary, d_model], W_U with the final norm folded in [d_model, vocabulary]."""

    layers: list
    w_e: np.ndarray
    w_u: np.ndarray


def array_of(parameter):
    return parameter.detach().double().numpy()


def _by_head(matrix, heads):
    """[d_model, heads x d_head] as [heads, d_model, d_head]."""
    return matrix.reshape(len(matrix), heads, -1).transpose(1, 0, 2)


def _folding(norm, add_one=False):
    """What a norm's mean and gain do to a row vector before a weight, as a dense matrix; then the mean alone."""
    gain = array_of(norm.weight) + add_one
    centring = np.eye(len(gain))
    if "LayerNorm" in type(norm).__name__:
        centring -= 1 / len(gain)
    return centring @ np.diag(gain), centring


def _with_gain(w, norm, add_one):
    """Factors of heads with the gain of a norm of queries or keys, of one head or of all heads at once."""
    gain = (array_of(norm.weight) + add_one).reshape(-1, 1, w.shape[2])
    return w * np.repeat(gain, len(w) // len(gain), axis=0)


def dense_model(name, model=None):
    """The dense reference of a zoo model (or of `model`, one of that architecture), from Hugging Face's own weights."""
    model = model or zoo.hf_model(name)
    heads = model.config.num_attention_heads
    one = name.startswith("gemma")
    layers = []
    if name == "gpt2":
        for block in model.transformer.h:
            fold, centring = _folding(block.ln_1)
            parts = np.split(array_of(block.attn.c_attn.weight), 3, axis=1)
            w_q, w_k, w_v = (_by_head(fold @ part, heads) for part in parts)
            w_o = array_of(block.attn.c_proj.weight).reshape(heads, -1, zoo.WIDTH)
            layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
        unfold = _folding(model.transformer.ln_f)[0]
        return DenseModel(layers, array_of(model.transformer.wte.weight), unfold @ array_of(model.lm_head.weight).T)
    if name == "neox":
        for block in model.gpt_neox.layers:
            fold, centring = _folding(block.input_layernorm)
            joint = array_of(block.attention.query_key_value.weight).reshape(heads, 3, -1, zoo.WIDTH)
            w_q, w_k, w_v = (fold @ joint[:, part].transpose(0, 2, 1) for part in range(3))
            w_o = array_of(block.attention.dense.weight).T.reshape(heads, -1, zoo.WIDTH)
            layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
        unfold = _folding(model.gpt_neox.final_layer_norm)[0]
        w_u = array_of(model.embed_out.weight if hasattr(model, "embed_out") else model.lm_head.weight).T
        return DenseModel(layers, array_of(model.gpt_neox.embed_in.weight), unfold @ w_u)
    for block in model.model.layers:
        # OLMo 2 has no norm in front of the attention.
        fold, centring = 2 * [np.eye(zoo.WIDTH)] if name == "olmo2" else _folding(block.input_layernorm, one)
        attention, kv_heads = block.self_attn, model.config.num_key_value_heads
        w_q = _by_head(fold @ array_of(attention.q_proj.weight).T, heads)
        w_k, w_v = (
            np.repeat(_by_head(fold @ array_of(part.weight).T, kv_heads), heads // kv_heads, axis=0)
            for part in (attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            w_q, w_k = _with_gain(w_q, attention.q_norm, one), _with_gain(w_k, attention.k_norm, one)
        w_o = array_of(attention.o_proj.weight).T.reshape(heads, -1, zoo.WIDTH)
        layers.append(DenseLayer(w_q, w_k, w_v, w_o, centring))
    unfold = _folding(model.model.norm, one)[0]
    return DenseModel(layers, array_of(model.model.embed_tokens.weight), unfold @ array_of(model.lm_head.weight).T)


def dense_copying(layer, dense):
    """`copying` and `positivity` of a layer's heads, from the k x k product spelled out."""
    w_u = dense.w_u - dense.w_u.mean(1, keepdims=True)  # centred over the vocabulary
    eigenvalues = [np.linalg.eigvals(o @ w_u @ dense.w_e @ v) for o, v in zip(layer.w_o, layer.w_v, strict=True)]
    copying = [np.mean(found.real > 0) for found in eigenvalues]
    return copying, [found.real.sum() / np.abs(found).sum() for found in eigenvalues]


def dense_self_match(layer, dense):
    """`self_match` of a layer's heads, from the whole vocabulary x vocabulary matrix."""
    scores = dense.w_e @ layer.qk @ dense.w_e.T
    diagonal = np.eye(len(dense.w_e), dtype=bool)
    return [(one[diagonal].mean() - one[~diagonal].mean()) / np.sqrt((one**2).mean()) for one in scores]


@functools.cache
def reference(name):
    return dense_model(name)


def bridge(name):
    return zoo.shared("bridge", name)


def edited(name, change, seed=0):
    """A bridge of a zoo model whose weights were changed first."""
    return zoo.wrapped(edited_hf(name, change, seed))


def edited_hf(name, change, seed=0):
    model = zoo.hf_model(name, seed)
    with torch.no_grad():
        change(model)
    return model
