"""What an edge gives by plain recomputation: no operators, the model's own modules and patched activations alone."""

import torch
from ablation_runs import logits, recorded

from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view
from tlspectral.tasks.repeated import repeated_sequences

LENGTH, SEQUENCES = 6, 3
POINTS = {"q": "query", "k": "key", "v": "value"}
ENTERING = {"q": "hook_q", "k": "hook_k", "v": "hook_v"}
"""Of latent attention: rotated queries and keys, and values, of all heads [batch, heads, pos, d_head]."""


def furthest(found, expected):
    return float((found - expected).abs().max())


def edge_of(view):
    """Two senders, of two layers where there are more than two, and layer and head of the receiver."""
    second = 1 if view.n_layers > 2 and view.rotary(1) is not None else 0
    return [(0, 1), (second, 2)], view.n_layers - 1, 1


def run_with(model, hooks, tokens=None):
    with model.hooks(fwd_hooks=hooks):
        return logits(model, tokens)


def removed_from_stream(model, senders, part, tokens=None):
    """What the senders write less what they write without the part, the norm behind at the intact run's scale."""
    view = attention_view(model)
    total = 0.0
    for layer in sorted({layer for layer, _ in senders}):
        names = view.hook_names(layer)
        intact = recorded(model, ("z", "attention_out"), tokens, [layer])
        with ablate(model, [sender for sender in senders if sender[0] == layer], part):
            z = recorded(model, ("z",), tokens, [layer])[layer, "z"]
        block = model.blocks[layer]
        behind = block._modules.get("ln1_post") or (block.ln1 if name_of(model) == "olmo2" else None)
        if behind is None:
            found = {}
            keep = (names["attention_out"], lambda out, hook, found=found: found.update(out=out.clone()))
            run_with(model, [(names["z"], lambda seen, hook, z=z: z.reshape(seen.shape)), keep], tokens)
            total = total + intact[layer, "attention_out"] - found["out"]
            continue
        # RMS norms: what is written is the sum over heads, column by column times one factor, which is held.
        with torch.no_grad():
            o, norm = block.attn.o.original_component, behind.original_component
            summed = o(intact[layer, "z"].flatten(2))
            factor = (norm(summed) / summed).nan_to_num()  # a token whose embedding is 0 writes 0, with the part or not
            total = total + (summed - o(z.flatten(2))) * factor
    return total


def name_of(model):
    return getattr(getattr(model, "original_model", None), "config", None) and model.original_model.config.model_type


def point_of(view, layer, what):
    """The hook point of queries, keys or values in front of the attention."""
    if is_latent(view, layer):
        return f"blocks.{layer}.attn.{ENTERING[what]}"
    return view.hook_names(layer)[POINTS[what]]


def is_latent(view, layer):
    return hasattr(view.model.blocks[layer].attn, "hook_kv_latent")


def read_from(model, layer, what, removed, tokens=None):
    """What passes hook_q, hook_k or hook_v of a layer when `removed` is taken from the stream that enters it."""
    view = attention_view(model)
    names, found = view.hook_names(layer), {}
    keep = (point_of(view, layer, what), lambda value, hook: found.update(value=value.clone()))
    run_with(model, [(names["residual"], lambda x, hook: x - removed), keep], tokens)
    return found["value"]


def columns_of(view, layer, head, what, captured):
    """Heads of a captured tensor that the head reads: itself, or the key/value head of its group; all from a latent."""
    raw = view.raw(layer)
    if is_latent(view, layer):
        return [head] if what == "q" else list(range(captured.shape[1]))
    if what == "q":  # of a gated attention the gate of each head stands behind its query, and is of the same receiver
        beside = captured.shape[2] // len(raw.w_q)
        return list(range(head * beside, (head + 1) * beside))
    assert captured.shape[2] == len(raw.w_k)
    return [head // (len(raw.w_q) // len(raw.w_k))]


def patch_of(view, layer, what, columns, values):
    """The hook that puts values into the columns of what passes hook_q, hook_k or hook_v."""
    axis = 1 if is_latent(view, layer) else 2

    def patch(captured, hook):
        edited = captured.clone()
        edited.movedim(axis, 0)[columns] = values.movedim(axis, 0)[columns]
        return edited

    return point_of(view, layer, what), patch


def patched(model, layer, what, columns, values, tokens=None, keep=()):
    return run_with(model, [patch_of(attention_view(model), layer, what, columns, values), *keep], tokens)


def recomputed(model, senders, part, layer, head, what, tokens=None):
    """Logits of a run in which the head reads the stream without what the senders write of the part."""
    view = attention_view(model)
    removed = removed_from_stream(model, senders, part, tokens)
    values = read_from(model, layer, what, removed, tokens)
    return patched(model, layer, what, columns_of(view, layer, head, what, values), values, tokens)


def repeated(view):
    return repeated_sequences(view, n_sequences=SEQUENCES, segment_length=LENGTH)


def copy_loss(logits, tokens):
    """The mean loss of the tokens of the copies that `induction` scores, in nats."""
    scored = logits[:, LENGTH + 1 : 2 * LENGTH].double().flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(scored, tokens[:, LENGTH + 2 :].flatten()))


def grabbed(view, tokens, names, edits=()):
    found = {}
    hooks = [*edits, *((name, lambda value, hook, name=name: found.update({name: value.clone()})) for name in names)]
    with torch.no_grad(), view.model.hooks(fwd_hooks=hooks):
        logits = view.model(tokens, return_type="logits")
    return logits, found


def write_of(view, tokens, sender, *, zero, at=None):
    """What a sender writes, or that less its mean; at one position of each sequence alone where some are given."""
    write = removed_from_stream(view.model, [sender], "output", tokens)
    if not zero:
        write = write - write.mean((0, 1))
    if at is not None:
        there = torch.zeros(write.shape[:2])
        there[range(len(at)), at] = 1.0
        write = write * there[..., None]
    return write


def cut_beside_heads(view, tokens, sender, layer, *, at=None):
    """Logits when the MLP of a layer, or for None the unembedding, reads without a write less its mean."""
    write = write_of(view, tokens, sender, zero=False, at=at)
    if layer is None:
        point = view.hook_names(view.n_layers - 1)["residual_after"]
        return run_with(view.model, [(point, lambda x, hook: x - write)], tokens)
    names, found = view.hook_names(layer), {}
    hooks = [(names["residual"], lambda x, hook: x - write)]
    if not getattr(view.model.cfg, "parallel_attn_mlp", False):  # it reads what the attention adds too
        attention = recorded(view.model, ("attention_out",), tokens, [layer])[layer, "attention_out"]
        hooks.append((names["attention_out"], lambda _, hook: attention))
    run_with(view.model, [*hooks, (names["mlp_out"], lambda x, hook: found.update(out=x.clone()))], tokens)
    return run_with(view.model, [(names["mlp_out"], lambda _, hook: found["out"])], tokens)


def cut_by_hand(view, tokens, sender, receiver, what, *, zero, at=None):
    """Logits and pattern of the receiver with one edge cut by the model's own modules: the stream edited for a read."""
    layer, head = receiver
    write = write_of(view, tokens, sender, zero=zero, at=at)
    values = read_from(view.model, layer, what, write, tokens)
    columns, found = columns_of(view, layer, head, what, values), {}
    keep = (view.hook_names(layer)["pattern"], lambda pattern, hook: found.update(pattern=pattern.clone()))
    logits = patched(view.model, layer, what, columns, values, tokens, keep=[keep])
    return logits, found["pattern"][:, head]
