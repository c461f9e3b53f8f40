"""A four-layer GPT-2 with one head of each type written into its weights, and eight random heads that write little."""

from typing import Any

import torch
import transformers

TOKENS, POSITIONS, D_HEAD = 60, 140, 80
WIDTH = 4 * D_HEAD  # a one-hot block for the token, one for the position, the token before, the token two before
TOKEN, POSITION, BEFORE, TWO_BEFORE = 0, 60, 200, 260
PLANTED = {
    (0, 0): {"previous_token"},
    (0, 1): {"local"},  # two tokens back
    (0, 2): {"self"},
    (0, 3): {"first_token"},
    (1, 0): {"duplicate", "self"},  # a token is equal to itself
    (1, 1): {"induction"},
    (1, 2): {"copy_suppression"},
    # It looks for a key two after the token before its query, which in a copied segment is what induction looks for.
    (1, 3): {"retrieval", "induction"},
}


def follower(token):
    """The token that the model predicts after `token`."""
    return (token + 7) % TOKENS


def planted_hf():
    """The model, with random weights in the heads of layers 2 and 3 alone."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=WIDTH, n_inner=8, n_layer=4, n_head=4, n_positions=POSITIONS,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    config.architectures = ["GPT2LMHeadModel"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        tokens, positions = torch.arange(TOKENS), torch.arange(POSITIONS)
        model.transformer.wte.weight[tokens, TOKEN + tokens] = 1
        model.transformer.wpe.weight[positions, POSITION + positions] = 1
        model.lm_head.weight[follower(tokens), TOKEN + tokens] = 1
        _plant(model)
        block: Any
        for block in model.transformer.h[2:]:
            # They read positions alone, so that two draws of tokens rank them alike.
            block.attn.c_attn.weight[POSITION:BEFORE].normal_(0, 0.3)
            # Powers of two that sum to 0: to the logit of no token, without rounding.
            block.attn.c_proj.weight[:, POSITION : POSITION + 2] = torch.tensor([1.0, -1.0]) / 16
    return model


def planted_bridge():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = planted_hf()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config, tokenizer=None)


def _plant(model):
    tokens = torch.arange(TOKENS)
    identity = torch.eye(TOKENS, D_HEAD)
    places = torch.nn.functional.normalize(torch.randn(POSITIONS, D_HEAD), dim=1)

    def head(layer, index):
        """Views of W_Q, W_K, W_V [width, d_head] and W_O [d_head, width] of a head."""
        attention, columns = model.transformer.h[layer].attn, slice(index * D_HEAD, (index + 1) * D_HEAD)
        parts = attention.c_attn.weight.view(WIDTH, 3, 4, D_HEAD)
        return parts[:, 0, index], parts[:, 1, index], parts[:, 2, index], attention.c_proj.weight[columns]

    def match(layer, index, of_query, of_key, rows=identity, query_rows=None, scale=2.0):
        w_q, w_k, *_ = head(layer, index)
        w_q[of_query : of_query + len(rows)] = scale * (rows if query_rows is None else query_rows)
        w_k[of_key : of_key + len(rows)] = scale * rows

    def write(layer, index, target, factor):
        *_, w_v, w_o = head(layer, index)
        w_v[TOKEN : TOKEN + TOKENS] = identity
        w_o[tokens, target] = factor

    for index, offset in ((0, 1), (1, 2), (2, 0)):
        match(0, index, POSITION, POSITION, places, torch.roll(places, offset, 0))
    head(0, 3)[1][POSITION] = 2 * places[0]
    model.transformer.h[0].attn.c_attn.bias.view(3, 4, D_HEAD)[0, 3] = 20 * places[0]
    write(0, 0, BEFORE + tokens, 0.1)  # 0.1 times what layer norm makes of 1 is about 1 again
    write(0, 1, TWO_BEFORE + tokens, 0.1)
    match(1, 0, TOKEN, TOKEN)
    match(1, 1, TOKEN, BEFORE)
    match(1, 2, TOKEN, TOKEN, query_rows=identity[follower(tokens)])
    match(1, 3, BEFORE, TWO_BEFORE)
    # The unembedding of a token reads the row of the token that it follows.
    write(1, 2, TOKEN + (tokens - 7) % TOKENS, -0.1)
    write(1, 3, TOKEN + (tokens - 7) % TOKENS, 0.1)
