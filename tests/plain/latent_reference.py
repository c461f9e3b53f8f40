"""Latent attention written out from the weights of transformers' module, in float64."""

import torch


def rms_scale(x, norm):
    return (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def linear(part, x):
    bias = None if part.bias is None else part.bias.detach().cpu().double()
    return torch.nn.functional.linear(x, part.weight.detach().cpu().double(), bias)


def behind_latents(module, query, key):
    """Queries and keys before rotation, [..., pos, heads, d_head], and 1/rms of their latents, [..., pos, 1].

    From the latents of queries (queries themselves where there are none) and of keys, line by line as in transformers.
    """
    query, key = query.detach().cpu().double(), key.detach().cpu().double()
    at_query = torch.ones_like(query[..., :1])
    if module.q_lora_rank is not None:
        at_query = rms_scale(query, module.q_a_layernorm)
        query = linear(module.q_b_proj, query * at_query * module.q_a_layernorm.weight.detach().cpu().double())
    latent, rotary = key.split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    at_key = rms_scale(latent, module.kv_a_layernorm)
    key = linear(module.kv_b_proj, latent * at_key * module.kv_a_layernorm.weight.detach().cpu().double())
    key = key.unflatten(-1, (module.num_heads, -1))[..., : module.qk_nope_head_dim]
    key = torch.cat([key, rotary[..., None, :].expand(*key.shape[:-1], -1)], -1)
    return query.unflatten(-1, (module.num_heads, -1)), key, at_query, at_key


def queries_and_keys(model, layer, residual):
    """The same from the residual stream that enters a layer, its norm in float64 too."""
    block = model.blocks[layer].original_component
    module, x = block.self_attn, residual.double()
    x = x * rms_scale(x, block.input_layernorm) * block.input_layernorm.weight.detach().cpu().double()
    down = module.q_proj if module.q_lora_rank is None else module.q_a_proj
    return behind_latents(module, linear(down, x), linear(module.kv_a_proj_with_mqa, x))


def edge_in_transformers(model, tokens, sender, receiver):
    """Logits of a model of transformers of which one receiver reads the stream without what a head writes.

    The receiver is (layer, input, head), of which the head counts for queries alone. The projections are run again on
    the changed stream by their own modules, and their outputs are put in the place of those of the run.
    """
    (layer, what, head), blocks = receiver, model.model.layers
    block, writer = blocks[layer], blocks[sender[0]].self_attn
    module, seen = block.self_attn, {}
    holds = [
        writer.o_proj.register_forward_pre_hook(lambda module, given: seen.update(z=given[0])),
        block.register_forward_pre_hook(lambda module, given: seen.update(x=given[0])),
    ]
    with torch.no_grad():
        model(tokens)
        for hold in holds:
            hold.remove()
        width = writer.v_head_dim
        columns = slice(sender[1] * width, (sender[1] + 1) * width)
        n = block.input_layernorm(seen["x"] - seen["z"][..., columns] @ writer.o_proj.weight[:, columns].T)
        heads, content = module.num_heads, module.qk_nope_head_dim
        if what == "q":
            latent = module.q_lora_rank is not None
            last = module.q_b_proj if latent else module.q_proj
            edits = {last: (last(module.q_a_layernorm(module.q_a_proj(n)) if latent else n), [head], slice(None))}
        else:
            both = module.kv_a_proj_with_mqa(n)
            every = module.kv_b_proj(module.kv_a_layernorm(both[..., : module.kv_lora_rank]))
            own = slice(content) if what == "k" else slice(content, None)
            edits = {module.kv_b_proj: (every, range(heads), own)}
            if what == "k":
                edits[module.kv_a_proj_with_mqa] = both, [0], slice(module.kv_lora_rank, None)
        put = []
        for part, (value, chosen, own) in edits.items():
            count = 1 if part is module.kv_a_proj_with_mqa else heads

            def edit(module, given, output, value=value, chosen=chosen, own=own, count=count):
                edited = output.clone().unflatten(-1, (count, -1))
                edited[..., chosen, own] = value.reshape(output.shape).unflatten(-1, (count, -1))[..., chosen, own]
                return edited.flatten(-2)

            put.append(part.register_forward_hook(edit))
        logits = model(tokens).logits
        for hook in put:
            hook.remove()
    return logits
