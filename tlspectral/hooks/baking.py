"""`bake`: write the removal of heads into the weights of a copy of the model, which can be saved without hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture, warn_caller
from tlspectral.hooks.ablation import ablate
from tlspectral.hooks.parts import Output
from tlspectral.models.hooking.exclusive import evaluating
from tlspectral.models.hooking.user_hooks import listed, user_hooks, without_user_hooks
from tlspectral.models.loading.checks import log_probabilities, require_agreement, require_tied
from tlspectral.models.loading.copies import copy_of_object, copy_without_hooks
from tlspectral.models.loading.encoders import has_no_head, with_head
from tlspectral.models.loading.given_objects import check_weights
from tlspectral.models.loading.pretrained import check_config
from tlspectral.models.loading.roads import bridge_of
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.blocks import output_map
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.packed import refuse_packed
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.heads_as_written import Heads

_WRAPPED = "._original_component"  # TransformerLens puts it into the names of modules that it wraps


@torch.no_grad()
def bake(model: Any, heads: Heads) -> Any:
    """Return a copy of a model whose weights lack these heads: a pruned model, which needs no hooks and can be saved.

    In the copy the output map (`o_proj`, W_O) is 0 where it reads these heads. Shapes stay, so the copy is not faster.

    >>> import tlspectral as tls, transformers
    >>> config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=97)
    >>> gpt2 = transformers.GPT2LMHeadModel(config)
    >>> pruned = tls.hooks.bake(gpt2, ["L0H1", "L1"])
    >>> bool(pruned.transformer.h[0].attn.c_proj.weight[12:24].any())  # its 12 rows of head 1
    False

    The copy computes what the model computes under `ablate(model, heads, tls.parts.Output("zero"))`, up to rounding.
    The given model stays as it is, so there has to be memory for a second one.

    Args:
        model: a causal language model of transformers, BERT or RoBERTa, a TransformerBridge of one of these, or a
            HookedTransformer.
        heads: "L5H1", (5, 1), "L5" (layer 5), "L5KV1" (a key/value group), a table row, a list of these, or a DataFrame
            with the columns `layer` and `head`. An empty list gives a plain copy.

    Returns:
        A model of transformers, also for a bridge; save it by `save_pretrained(folder)`. For a HookedTransformer a
        HookedTransformer. Your hooks on the model are not copied; a warning names them.

    Raises:
        BadHead: a head does not exist.
        TypeError: another object: give `tls.load_model(object)`.
        BadWeights: quantised weights (load the model that they were made from), or untied embeddings with a config that
            ties them.
        UnsupportedArchitecture: an output map that is parametrized or tied to another weight; a bridge in compatibility
            mode, with learned rotary positions, or without a model of transformers in it; a model that is spread over
            devices, or that `load_model` does not read.

    Not established: that the model can do without these heads. Compare `tls.evaluate(model, task)` of both models, or
    compare these heads with random heads by `ablation_sweep(control="random")`. More: docs/head_mask.md
    """
    import transformers

    given = isinstance(model, transformers.PreTrainedModel)
    if isinstance(model, torch.nn.Module):
        refuse_packed(model, "bake", "which cannot hold zeros for a head: use ablate, or bake the unquantised model")
    source = bridge_of(model) if given else model  # warns of hooks on a model of transformers
    view = attention_view(source)
    by_layer = heads_by_layer(view, heads)
    if hasattr(source, "spectral_geometry"):
        raise UnsupportedArchitecture(
            f"{view.source['model']} has learned rotary positions, which bake does not copy: bake the model that it "
            "was made from, and make the copy spectral"
        )
    if not given and (hooks := [*user_hooks(model)]):
        warn_caller(
            f"hooks of yours are on the {type(model).__name__}, at {listed(hooks)}; the copy that bake returns has "
            "none of them: put them on the copy"
        )
    if given:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has hooks of PyTorch on")
            copied = copy_of_object(model, type(model).__name__, shared=False)
    else:
        copied = _of_transformers(view) if view.backend == "bridge" else copy_without_hooks(model, shared=False)
    if view.backend == "bridge":
        require_tied(copied, view.source["model"])
    for layer, chosen in by_layer.items():
        by_head = _output_of(copied, view, layer)
        by_head[chosen] = 0
    with without_user_hooks(source), evaluating(source), ablate(source, heads, Output("zero")):
        expected = log_probabilities(source)
    runs = copied if view.backend == "hooked" else with_head(copied)
    with evaluating(runs):
        advice = "take off what changes the model besides its weights, or give the model as load_model returns it"
        require_agreement(runs, expected, f"the copy of this {type(model).__name__} without these heads", advice)
    return copied


def _of_transformers(view: AttentionView) -> Any:
    """Return a new model of transformers with copies of the weights in a bridge.

    Raises UnsupportedArchitecture if the bridge wraps no model of transformers, is in compatibility mode, or lacks a
    weight; BadWeights for quantised weights.
    """
    import transformers
    from transformers.initialization import no_init_weights

    bridge, original, name = view.model, view.model.original_model, view.source["model"]
    if not isinstance(original, transformers.PreTrainedModel):
        raise UnsupportedArchitecture(
            f"{name} holds a {type(original).__name__} of TransformerLens, which transformers cannot save: give a "
            "model of transformers, or load it with backend='hooked'"
        )
    if getattr(bridge, "compatibility_mode", False):
        raise UnsupportedArchitecture(
            f"the bridge of {name} is in compatibility mode, which may have changed its weights: bake the bridge "
            "before enable_compatibility_mode(), or the model of transformers"
        )
    check_config(original.config, name)
    check_weights(original, name)
    kind: Any = type(original)
    config, prefix, options = copy.deepcopy(original.config), "", {}
    held: dict[str, Tensor] = {
        path.replace(_WRAPPED, ""): value
        for values in (original.named_parameters, original.named_buffers)
        for path, value in values(remove_duplicate=False)
    }
    if has_no_head(original):
        kind, prefix = transformers.MODEL_MAPPING[type(config)], f"{config.model_type}."
        options = {"add_pooling_layer": any(path.startswith(f"{prefix}pooler.") for path in held)}
    with no_init_weights():
        made: Any = kind(config, **options)
    if missing := _filled(made, held, prefix):
        raise UnsupportedArchitecture(
            f"the bridge of {name} does not hold {missing[0]} as its {kind.__name__} does: take off what replaces or "
            "parametrizes its weights, or give the model of transformers"
        )
    if (generation := getattr(original, "generation_config", None)) is not None:
        made.generation_config = copy.deepcopy(generation)
    return made.to(view.device).train(bridge.training)


def _filled(made: Any, held: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Put copies of tensors into the parameters and buffers of a new model; return the parameters that found none.

    made: the model, of transformers; its tied parameters stay tied. held: from name to tensor. prefix: what stands in
    front of the new model's names there, such as "bert.".
    """
    kept: dict[int, Tensor] = {}
    missing = []
    for owner_path, owner in made.named_modules():
        for holder in (owner._parameters, owner._buffers):
            for leaf, own in holder.items():
                path = f"{prefix}{owner_path}.{leaf}" if owner_path else f"{prefix}{leaf}"
                value = held.get(path)
                if own is None:
                    continue
                if value is None or value.shape != own.shape:
                    missing += [path] if holder is owner._parameters else []
                    continue
                if id(value) not in kept:
                    new = value.detach().clone()
                    kept[id(value)] = new if holder is owner._buffers else nn.Parameter(new, value.requires_grad)
                holder[leaf] = kept[id(value)]
    return missing


def _output_of(copied: Any, view: AttentionView, layer: int) -> Tensor:
    """Return W_O of a layer of the copy as a view [heads, d_head, d_model] on its storage, to be changed in place.

    copied: the copy, of transformers or a HookedTransformer. view: the model that was copied. Raises
    UnsupportedArchitecture if W_O is not a plain weight of its own, or is not the weight that the view reads.
    """
    w_o = view.raw(layer).w_o
    if view.backend == "hooked":
        path, module, leaf = f"blocks.{layer}.attn", copied.blocks[layer].attn, "W_O"
    else:
        path = next(_paths_of(output_map(view.blocks[layer].module), view, copied), "")
        module, leaf = copied.get_submodule(path), "weight"
    weight = module._parameters.get(leaf)
    problem = None
    if not path or weight is None or not weight.is_floating_point():
        problem = "it is not a plain weight (quantised, parametrized, masked or an adapter)"
    elif sum(other.data_ptr() == weight.data_ptr() for _, other in copied.named_parameters(remove_duplicate=False)) > 1:
        problem = "it is tied to another weight, which would change too: give it a weight of its own"
    else:
        rows = weight.data if view.backend == "hooked" or type(module).__name__ == "Conv1D" else weight.data.T
        by_head = rows.view(w_o.shape) if view.backend == "hooked" else rows.unflatten(0, w_o.shape[:2])
        if torch.equal(by_head, w_o.to(by_head)):
            return by_head
        problem = "the attention of the loaded model reads another weight"
    raise UnsupportedArchitecture(
        f"layer {layer}, W_O: bake cannot set heads to 0 in the copy of the model ({path or 'no module'}): {problem}; "
        "use ablate, which changes no weights"
    )


def _paths_of(module: Any, view: AttentionView, copied: Any) -> Iterator[str]:
    """Yield the names that a bridge's module has in a copy of transformers' model.

    module: a module that the bridge wraps, such as `o_proj`. view: of the bridge. copied: the copy.
    """
    prefix = "" if type(copied) is type(view.model.original_model) else f"{copied.config.model_type}."
    names = {name for name, _ in copied.named_modules()}
    for path, found in view.model.original_model.named_modules(remove_duplicate=False):
        name = path.replace(_WRAPPED, "").removeprefix(prefix)
        if found is module and name in names:
            yield name
