"""The terms of one score by plainer routes: the parts that hooks remove, and numpy loops over stored weights."""

import numpy as np
import torch
import zoo

from tlspectral.algebra.rotary import in_float64, per_pair, with_gain_and_phase
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.attention.score_side import Rotation, side
from tlspectral.models.running.passes import run_until
from tlspectral.models.stream.writes import head_writes, z_of

PARTS = ["symmetric", "antisymmetric", "phase", "outside_m"]
QUERY, KEY = 21, 17  # within the window of 8
PROMPT = zoo.prompt(1)


def captured_of(view, layer, tokens=PROMPT, edits=()):
    """Activations of the layer's hook points and of all earlier ones, under hooks."""
    found = {}
    names = [name for index in range(layer + 1) for name in view.hook_names(index).values()]
    hooks = [(name, lambda value, hook, name=name: found.update({name: value.detach()})) for name in names]
    run_until(view, tokens, [*edits, *hooks], last=view.hook_names(layer)["pattern"])
    return found


def scores_of_run(view, layer, head, found):
    """The scores of a head as the removal of parts has them, from the activations of a run, in float64."""
    folded, names = view.layer(layer), view.hook_names(layer)
    q, k = (in_float64(found[names[point]]) for point in ("query", "key"))
    geometry, rotation = folded.rotary, None
    if geometry is not None:
        tables = view.rotary_tables(layer, q.shape[1], found) or geometry.position_tables(q.shape[1])
        rotation = Rotation(geometry, *(per_pair(in_float64(table), geometry) for table in tables)).of_heads([head])
    sides, kv_head = [], folded.kv_head(head)
    for values, at, bias, norm, own in (
        (q, head, folded.b_q[[head]], folded.q_norm, head),
        (k, head * k.shape[2] // folded.n_heads, folded.b_k[[kv_head]], folded.k_norm, kv_head),
    ):
        scale = None if norm is None else norm.token_scale(values)[..., [at]]
        own_norm = norm and norm.of_heads([own])
        sides.append(side(values[:, :, [at]], bias, own_norm, rotation, queries=values is q, token_scale=scale))
    return HeadScores(folded, [head], *sides)


def own_score(view, layer, head, found, query=QUERY, key=KEY):
    """The head's score before a softcap, from the queries and keys of a run."""
    return float(scores_of_run(view, layer, head, found).whole()[0, 0, query, key])


def sources_of(view, layer, found):
    """What every source wrote at every position, [pos, d_model] by name."""
    entered = in_float64(found[view.hook_names(0)["residual"]])[0]
    written = {"embedding": entered}
    positions = view.position_embedding()
    if positions is not None:
        written["positions"] = in_float64(positions[: len(entered)].detach())
        written["embedding"] = entered - written["positions"]
    written["attention biases"] = torch.zeros_like(entered)
    for earlier in range(layer):
        names, writes = view.hook_names(earlier), head_writes(view, earlier, in_float64)
        z = z_of(in_float64(found[names["z"]]), writes.w_o)
        scale = writes.token_scale(z)
        written |= {f"L{earlier}H{head}": value[0] for head, value in enumerate(writes.written(z, scale).detach())}
        written[f"L{earlier}MLP"] = in_float64(found[names["mlp_out"]])[0]
        written["attention biases"] = written["attention biases"] + writes.of_biases(scale)[0].detach()
    return written


def plain_terms(view, layer, head, found, query=QUERY, key=KEY):
    """Every term from the weights as stored, one pair of sources and one rotary pair at a time, in numpy."""
    raw = view.raw(layer)
    kv_head = head * len(raw.w_k) // len(raw.w_q)
    array = lambda value: value.detach().double().numpy()  # noqa: E731
    x = array(found[view.hook_names(layer)["residual"]])[0]
    sources = {name: array(value) for name, value in sources_of(view, layer, found).items()}

    def normalised(part, place):
        whole = x[place]
        if raw.norm.kind == "LN":
            part, whole = part - part.mean(), whole - whole.mean()
        rms = 1.0 if raw.norm.kind == "none" else np.sqrt((whole**2).mean() + raw.norm.eps)
        return part / rms * (1.0 if raw.norm.gain is None else array(raw.norm.gain))

    def biases(weight, bias):
        read = 0.0 if raw.norm.bias is None else np.einsum("m,hmd->hd", array(raw.norm.bias), weight)
        return read + (0.0 if bias is None else array(bias)) + np.zeros((len(weight), weight.shape[2]))

    w_q, w_k = array(raw.w_q), array(raw.w_k)
    b_q, b_k = biases(w_q, raw.b_q), biases(w_k, raw.b_k)

    def normed(vector, norm, weight, bias, place, own):
        if norm is None:
            return vector
        every = np.einsum("m,hmd->hd", normalised(x[place], place), weight) + bias
        if norm.centred:
            every, vector = every - every.mean(-1, keepdims=True), vector - vector.mean()
        square = (every**2).mean() if norm.over_heads else (every[own] ** 2).mean()
        gain = 1.0 if norm.gain is None else array(norm.gain)
        return (
            vector / np.sqrt(square + norm.eps) * (gain if np.ndim(gain) < 2 else gain[own * len(gain) // len(weight)])
        )

    as_query = lambda vector: normed(vector, raw.q_norm, w_q, b_q, query, head)  # noqa: E731
    as_key = lambda vector: normed(vector, raw.k_norm, w_k, b_k, key, kv_head)  # noqa: E731

    def scored(of_query, of_key):
        """Even and odd part of the product of a query and a key."""
        if raw.rotary is None:
            return raw.score_scale * float(of_query @ of_key), 0.0
        geometry = raw.rotary.of_heads([head])
        of_query = array(with_gain_and_phase(torch.tensor(of_query)[None, None], geometry)[0, 0])
        theta = array(geometry.theta).reshape(-1)
        even = odd = 0.0
        columns = set(range(len(of_query)))
        for t, (re, im) in enumerate(zip(geometry.real_index.tolist(), geometry.imag_index.tolist(), strict=True)):
            b = (
                (of_query[re] + 1j * of_query[im])
                * np.conj(of_key[re] + 1j * of_key[im])
                * geometry.attention_scaling**2
            )
            even += np.cos((query - key) * theta[t]) * b.real
            odd -= np.sin((query - key) * theta[t]) * b.imag
            columns -= {re, im}
        even += sum(of_query[column] * of_key[column] for column in columns)
        return raw.score_scale * even, raw.score_scale * odd

    found_terms = {}
    for a, at_query in [*sources.items(), ("bias", None)]:
        for b, at_key in [*sources.items(), ("bias", None)]:
            n_a, n_b = (None if s is None else normalised(s[p], p) for s, p in ((at_query, query), (at_key, key)))
            q = as_query(b_q[head] if n_a is None else n_a @ w_q[head])
            k = as_key(b_k[kv_head] if n_b is None else n_b @ w_k[kv_head])
            content, phase = scored(q, k)
            if n_a is None or n_b is None:
                found_terms[a, b] = [0.0, 0.0, 0.0, content + phase]
                continue
            exchanged, _ = scored(as_query(n_b @ w_q[head]), as_key(n_a @ w_k[kv_head]))
            found_terms[a, b] = [(content + exchanged) / 2, (content - exchanged) / 2, phase, 0.0]
    return found_terms
