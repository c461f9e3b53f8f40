"""Attention with keys in any order, written out position by position in float64."""

import torch
from latent_reference import behind_latents

from tlspectral.algebra.rotary import per_pair
from tlspectral.models.reading.alibi import alibi_slopes
from tlspectral.models.reading.latent import Latent
from tlspectral.models.running.passes import capture_until


def normed(x, norm):
    """Queries or keys [..., heads, d_head] behind the norm that some models put on them."""
    if norm is None:
        return x
    over = (-2, -1) if norm.over_heads else -1
    return (
        x
        / (x.square().mean(over, keepdim=True) + norm.eps).sqrt()
        * (1 if norm.gain is None else norm.gain.detach().double())
    )


class KeysInPlaces:
    """Logits of the last query for any order of the keys, written out: rotate every key, multiply, scale, cap, mask."""

    def __init__(self, view, layer, tokens):
        names = view.hook_names(layer)
        captured = capture_until(view, tokens[None], list(names.values()), last=names["pattern"])
        self.raw, self.n = view.raw(layer), len(tokens)
        if isinstance(self.raw.k_norm, Latent):
            module = view.model.blocks[layer].original_component.self_attn
            q, self.k, _, _ = behind_latents(module, captured[names["query"]][0], captured[names["key"]][0])
            self.q = q[-1]
        else:
            q, k = captured[names["query"]][0, -1].double(), captured[names["key"]][0].double()
            self.q, self.k = normed(q, self.raw.q_norm), normed(k, self.raw.k_norm)
        self.k = self.k.repeat_interleave(len(self.q) // self.k.shape[1], dim=1)  # [pos, heads, d_head]
        self.pattern = captured[names["pattern"]][0, :, -1].double()
        self.seen = self.pattern.amax(0) > 0  # the scores of the zoo are small enough for nothing to underflow
        self.tables = None
        if self.raw.rotary is not None:
            found = view.rotary_tables(layer, self.n, captured)
            found = self.raw.rotary.position_tables(self.n) if found is None else found
            self.tables = [per_pair(t.reshape(-1, *t.shape[-2:])[0].double(), self.raw.rotary) for t in found]

    def turned(self, x, position):
        """[heads, d_head] at one position."""
        out = x.clone()
        for pair, (real, imag) in enumerate(zip(self.raw.rotary.real_index, self.raw.rotary.imag_index, strict=True)):
            turn = torch.complex(self.tables[0][position, pair], self.tables[1][position, pair])
            value = torch.complex(x[:, real], x[:, imag]) * turn
            out[:, real], out[:, imag] = value.real, value.imag
        return out

    def heads(self, order):
        """Softmax weights [heads, pos] with key `order[j]` at position j."""
        return self.logits(order).masked_fill(~self.seen, -torch.inf).softmax(-1)

    def logits(self, order):
        rows = []
        for position, key in enumerate(order):
            q, k = self.q, self.k[key]
            if self.tables is not None:
                q, k = self.turned(q, self.n - 1), self.turned(k, position)
            score = self.raw.score_scale * (q * k).sum(-1)
            rows.append(score + position * torch.tensor(alibi_slopes(len(q))).double() if self.raw.alibi else score)
        scores = torch.stack(rows, dim=-1)
        return scores if self.raw.softcap is None else self.raw.softcap * torch.tanh(scores / self.raw.softcap)

    def pair_logits(self, order):
        """[heads, pairs, pos], with the model's scale and without its softcap."""
        rows = []
        for position, key in enumerate(order):
            q, k = self.turned(self.q, self.n - 1), self.turned(self.k[key], position)
            product = q * k
            rows.append(product[:, self.raw.rotary.real_index] + product[:, self.raw.rotary.imag_index])
        return self.raw.score_scale * torch.stack(rows, dim=-1)

    def still_logits(self):
        """[heads, pos], what columns in no pair give."""
        still = torch.ones(self.q.shape[1], dtype=torch.bool)
        still[self.raw.rotary.real_index] = still[self.raw.rotary.imag_index] = False
        return torch.einsum("hd,phd->hp", self.q[:, still], self.k[:, :, still])

    def pairs(self, order):
        return self.pair_logits(order).masked_fill(~self.seen, -torch.inf).softmax(-1)

    def placed(self, logits_of):
        """A[.., k, j] over visible keys before the query: all keys at place j at once, one rotation of the order."""
        kept = [position for position in range(self.n - 1) if self.seen[position]]
        columns = {}
        for shift in range(len(kept)):
            order = list(range(self.n))
            for place, position in enumerate(kept):
                order[position] = kept[(place + shift) % len(kept)]
            found = logits_of(order)
            for place, position in enumerate(kept):
                columns[(place + shift) % len(kept), place] = found[..., position]
        size = range(len(kept))
        return torch.stack([torch.stack([columns[k, j] for j in size], dim=-1) for k in size], dim=-2)
