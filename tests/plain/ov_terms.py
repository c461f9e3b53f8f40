"""What heads write by plainer routes: numpy loops over stored weights, one head, key and source at a time."""

import numpy as np
import torch
from score_terms import sources_of


def whole_run(model, view, tokens):
    """Everything that passes the hook points of all layers in one whole pass, and the logits."""
    found = {}
    names = {name for index in range(view.n_layers) for name in view.hook_names(index).values()}
    hooks = [(name, lambda value, hook, name=name: found.update({name: value.detach()})) for name in names]
    with torch.no_grad(), view.hooks_on([one for one in hooks if one[0] in view.hook_points]):
        logits = model(tokens)
    return found, logits[0]


def array(value):
    return value.detach().double().cpu().numpy()


class PlainHead:
    """One head of a run: what it writes at a query, by key and source."""

    def __init__(self, view, found, layer, head, query):
        self.raw, self.names, self.query = view.raw(layer), view.hook_names(layer), query
        raw, n_heads = self.raw, len(self.raw.w_q)
        self.kv = head * len(raw.w_v) // n_heads
        self.w_v, self.w_o = array(raw.w_v)[self.kv], array(raw.w_o)[head]
        self.pattern = array(found[self.names["pattern"]])[0, head, query]
        self.x = array(found[self.names["residual"]])[0]
        z = array(found[self.names["z"]])[0, query].reshape(n_heads, -1)
        self.b_o, self.behind, self.multiplier = view.behind(layer)
        total = np.einsum("hd,hdm->m", z, array(raw.w_o)) + (0.0 if self.b_o is None else array(self.b_o))
        self.rms = np.sqrt((total**2).mean() + self.behind.eps) if self.behind.kind == "RMS" else 1.0
        self.own = self.behind_norm(z[head] @ self.w_o)
        self.sources = {name: array(value) for name, value in sources_of(view, layer, found).items()}

    def behind_norm(self, written):
        gain = 1.0 if self.behind.gain is None else array(self.behind.gain)
        return self.multiplier * written / self.rms * gain

    def normalised(self, part, key):
        norm, whole = self.raw.norm, self.x[key]
        if norm.kind == "LN":
            part, whole = part - part.mean(), whole - whole.mean()
        rms = 1.0 if norm.kind == "none" else np.sqrt((whole**2).mean() + norm.eps)
        return part / rms * (1.0 if norm.gain is None else array(norm.gain))

    def term(self, source, key):
        """What the head writes of one source at one key, [d_model]."""
        if source == "bias":
            value = np.zeros(self.w_v.shape[1]) if self.raw.b_v is None else array(self.raw.b_v)[self.kv]
            value = value + (0.0 if self.raw.norm.bias is None else array(self.raw.norm.bias) @ self.w_v)
        else:
            value = self.normalised(self.sources[source][key], key) @ self.w_v
        return self.behind_norm(self.pattern[key] * (value @ self.w_o))
