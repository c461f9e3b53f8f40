"""Ablated heads of a running model by explicit operators in float64: dense M_t on tokens with a 1 appended."""

import torch
from ablation_runs import allowed_keys, applicable, delegated, recorded, rotary_parts
from latent_reference import queries_and_keys

from tlspectral.algebra.rotary import per_pair
from tlspectral.hooks import ablate, parts
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.alibi import alibi_slopes
from tlspectral.models.reading.latent import Latent

# part, frequencies, include_bias
CASES = [
    ("symmetric", None, False),
    ("antisymmetric", None, False),
    ("rope_phase", None, False),
    ("rope_phase", "first", True),
    ("rotary_band", "last", False),
    ("rotary_band", "mask", False),
    ("symmetric_static", None, False),
    ("antisymmetric_static", None, False),
]


def explicit_pattern(view, name, index, seen, case, heads):
    """Softmax of the ablated scores of some heads: dense M_t on tokens with a 1 appended, one pair at a time."""
    part, pairs, include_bias = case
    layer = view.layer(index)
    tokens = layer.norm.normalized(seen[index, "residual"].cpu().double())
    length = tokens.shape[1]
    with_bias = torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1)
    plain = torch.cat([tokens, torch.zeros_like(tokens[..., :1])], -1)
    geometry = layer.rotary
    cos = sin = None
    still = list(range(layer.d_head))
    if geometry is not None:
        captured = {
            view.hook_names(index)[point]: seen[index, point] for point in ("cos", "sin") if (index, point) in seen
        }
        tables = view.rotary_tables(index, length, captured) or geometry.position_tables(length)
        cos, sin = (per_pair(t.reshape(-1, *t.shape[-2:])[0].cpu().double(), geometry) for t in tables)
        turning = {*geometry.real_index.tolist(), *geometry.imag_index.tolist()}
        still = [column for column in still if column not in turning]

    latent = isinstance(layer.k_norm, Latent)
    if latent:
        _, _, at_query, at_key = queries_and_keys(view.model, index, seen[index, "residual"].cpu())

    def mean_square_of_all(weights, biases):
        flat = torch.cat([with_bias[..., :-1] @ w + b for w, b in zip(weights, biases, strict=True)], dim=-1)
        return flat.square().mean(-1)

    patterns = []
    for head in heads:
        w_q, w_k = layer.w_q[head], layer.w_k[layer.kv_head(head)]
        b_q, b_k = layer.b_q[head], layer.b_k[layer.kv_head(head)]
        w_q, w_k = torch.cat([w_q, b_q[None]]), torch.cat([w_k, b_k[None]])
        loudness = still_loudness = torch.ones((), dtype=torch.float64)
        if latent:
            loudness, still_loudness = at_query, at_key.mT
        elif layer.q_norm is not None:
            if layer.q_norm.centred:
                w_q, w_k = (w - w.mean(-1, keepdim=True) for w in (w_q, w_k))
            a, b = (with_bias @ w_q).square().mean(-1), (with_bias @ w_k).square().mean(-1)
            if layer.q_norm.over_heads:
                a, b = mean_square_of_all(layer.w_q, layer.b_q), mean_square_of_all(layer.w_k, layer.b_k)
            gains = [torch.ones(()) if norm.gain is None else norm.gain for norm in (layer.q_norm, layer.k_norm)]
            if gains[0].ndim == 2:
                gains = gains[0][head], gains[1][layer.kv_head(head)]
            loudness = 1 / ((a + layer.q_norm.eps)[:, :, None] * (b + layer.k_norm.eps)[:, None, :]).sqrt()
            w_q, w_k = w_q * gains[0], w_k * gains[1]

        def between(x, m, y=None):
            return x @ m @ (x if y is None else y).mT

        m_still = w_q[:, still] @ w_k[:, still].T
        whole = still_loudness * between(with_bias, m_still)
        at = with_bias if include_bias else plain
        content, transposed = (still_loudness * between(at, m) for m in (m_still, m_still.T))
        removed = torch.zeros_like(whole)
        for t in range(0 if geometry is None else geometry.n_pairs):
            re, im = int(geometry.real_index[t]), int(geometry.imag_index[t])
            a, c, b, d = w_q[:, re], w_q[:, im], w_k[:, re], w_k[:, im]
            m_t = torch.outer(torch.complex(a, c), torch.complex(b, d).conj())
            even = torch.outer(cos[:, t], cos[:, t]) + torch.outer(sin[:, t], sin[:, t])
            odd = torch.outer(sin[:, t], cos[:, t]) - torch.outer(cos[:, t], sin[:, t])
            whole = whole + even * between(with_bias, m_t.real) - odd * between(with_bias, m_t.imag)
            acts = even[0, 0] if part.endswith("static") else even  # that of two tokens at one position
            content = content + acts * between(at, m_t.real)
            transposed = transposed + acts * between(at, m_t.real.T)
            if part in rotary_parts and (pairs is None or pairs[t]):
                removed = removed - odd * between(at, m_t.imag)
                if part == "rotary_band":
                    removed = removed + even * between(at, m_t.real)
        if part in ("antisymmetric", "antisymmetric_static"):
            removed = (content - transposed) / 2
        elif part in ("symmetric", "symmetric_static"):
            removed = (content + transposed) / 2
        scores = layer.score_scale * loudness * (whole - removed)
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.alibi:
            scores = scores + alibi_slopes(layer.n_heads)[head] * torch.arange(length)
        patterns.append(scores.masked_fill(~allowed_keys(name, index, length), -torch.inf).softmax(-1))
    return torch.stack(patterns, 1)


def part_of_case(case, geometry):
    """The part, and its pairs as a mask."""
    name, which, include_bias = case
    frequencies, mask = chosen_pairs(geometry, which)
    kinds = {kind.name: kind for kind in (parts.Symmetric, parts.Antisymmetric, parts.RopePhase)}
    if name == "rotary_band":
        return parts.Band(frequencies), mask
    given = {} if frequencies is None else {"frequencies": frequencies}
    given |= {"static": True} if name.endswith("_static") else {}
    return kinds[name.removesuffix("_static")](include_bias=include_bias, **given), mask


def chosen_pairs(geometry, which):
    """Frequencies as they are given to a part, and as a mask."""
    if which is None or geometry is None:
        return None, None
    mask = torch.zeros(geometry.n_pairs, dtype=torch.bool)
    if which == "first":
        mask[0] = True
        return [0], mask
    if which == "last":
        mask[-1] = True
        return [geometry.n_pairs - 1], mask
    mask[::2] = True
    return mask, mask


def run_ablated(model, case, points, tokens=None):
    """(layers, heads, mask of pairs, activations) of a run with a part removed from two heads of every layer."""
    view = attention_view(model)
    layers = applicable(view, case[0])
    part, mask = part_of_case(case, view.rotary(layers[0]))
    heads = [1, view.n_heads(0) - 1]
    chosen = [(layer, head) for layer in layers for head in heads]
    with ablate(model, chosen, part):
        return layers, heads, mask, recorded(model, points, tokens)


def worst_error(model, backend, name, case, tokens=None):
    """Largest |pattern - explicit pattern| over all ablated heads, and of z where edits of scores are discarded."""
    points = ("residual", "pattern", "value", "z", "cos", "sin")
    layers, heads, mask, seen = run_ablated(model, case, points, tokens)
    errors = []
    for index in layers:
        expected = explicit_pattern(attention_view(model), name, index, seen, (case[0], mask, case[2]), heads)
        errors.append(float((seen[index, "pattern"].cpu().double()[:, heads] - expected).abs().max()))
        if delegated(backend, name):
            z, values = (seen[index, point].cpu().double().transpose(1, 2) for point in ("z", "value"))
            if attention_view(model).raw(index).v_norm is not None:  # Gemma 4: values of norm 1
                values = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            z, values = z[:, heads], values.repeat_interleave(z.shape[1] // values.shape[1], 1)[:, heads]
            errors.append(float((z - expected @ values).abs().max()))
    return max(errors)


def case_name(case):
    return "-".join(str(value) for value in case if value)
