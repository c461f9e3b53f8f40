"""`attention_sinks`: a table of the keys that most later queries of a layer attend to."""

from typing import Any

import pandas as pd

from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.heads.detectors.sinks import found_sinks
from tlspectral.models.reading import measured
from tlspectral.models.running.long_prompts import strips_for, strips_noted
from tlspectral.models.running.prompts import packed_prompts
from tlspectral.models.running.text import token_text
from tlspectral.tables.schema import Schema, columns

ATTENTION_SINKS = Schema(
    "attention_sinks",
    columns("""
        layer  | index                 | Layer, from 0.
        prompt | index                 | Prompt, from 0.
        key    | index                 | Position of the key in its prompt, from 0.
        token  | text                  | The key's token; its id without a tokenizer.
        share  | attention probability | Mean attention to the key, over the heads of the layer and the queries that see
               |                       | the key and stand at least 8 tokens behind it.
    """),
    "`tls.heads.attention_sinks`",
)


def attention_sinks(model: Any, prompts: Any) -> pd.DataFrame:
    """Find attention sinks: keys that most later queries of a layer attend to. One row per layer, prompt and sink.

    Use it to see which tokens attract attention in every head, before you read mean attention as a preference.

        texts = ["The cat sat on the mat. " * 8, "Once upon a time there was a king. " * 5]
        sinks = tls.heads.attention_sinks(tls.load_model("smollm2-135m"), texts)
        sinks[sinks["key"] > 0].groupby("layer").size()  # sinks other than the first token

    A key is a sink if its mean attention (`share`) exceeds max(.15, 4 / n). The mean is over the heads of the layer and
    over the queries that see the key and stand at least 8 tokens after it (in an encoder, before or after). n is the
    mean number of keys that these queries see. A key with fewer than 16 such queries is undecided and not in the table:
    the last 23 keys of a prompt, and all keys under a window below 24 tokens.

    Args:
        model: a TransformerBridge or HookedTransformer. Hooks on it stay in force.
        prompts: strings, token ids [batch, pos], lists of ids, or a tokenizer's batch; padding is not counted.

    Returns:
        DataFrame sorted by layer, prompt and key; it includes the first token where it is a sink. Columns: `layer,
        prompt, key, token, share`. `prompt` and `key` count from 0, `token` is text, `share` is an attention
        probability. `attrs["sinks"]` has the least share (`least`) and the numbers of keys (`n_keys`), undecided keys
        (`n_undecided`) and sinks (`n_found`): one number, or a dict such as `{"L0": 31, ...}` where layers differ.

    Raises:
        TypeError, ValueError: prompts in none of these forms, empty, or longer than the model allows.
        UnsupportedArchitecture: the model exposes no attention pattern.

    Not established: that other prompts have sinks at the same tokens, or that the model needs them. A single head can
    have a sink where its layer has none. More: docs/detectors.md, docs/results/sinks.md.
    """
    with measured(model) as view:
        packed = packed_prompts(view, prompts)
        at_once = sequences_at_once(view, packed.tokens.shape[1])
        sinks = found_sinks(view, packed, view.layers, at_once)
        rows = [
            (
                layer,
                prompt,
                key,
                token_text(view, int(packed.tokens[prompt, key])),
                float(sinks.share[layer][prompt, key]),
            )
            for layer in view.layers
            for prompt, key in sinks.found[layer].nonzero().tolist()
        ]
        table = pd.DataFrame(rows, columns=["layer", "prompt", "key", "token", "share"])
        attrs = {"n_sequences": len(packed.tokens), "batch": at_once, **sinks.noted}
        attrs |= strips_noted(strips_for(view, packed.tokens.shape[1]))
        return ATTENTION_SINKS.frame(table, {**view.origin(), **attrs, **packed.noted})
