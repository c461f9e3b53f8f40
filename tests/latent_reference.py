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
