"""Checks after a load: the model computes the same as its checkpoint, and no weight was left out.

transformers drops tensors that config.json does not ask for, and reports only some. Without a query/key norm, a bias or
a layer the model is another one. Masks, rotary frequencies, extra prediction layers and parts for images or sound
change nothing that is measured, so they may be dropped.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from tlspectral.errors import BadWeights, UnsupportedArchitecture, warn_caller
from tlspectral.models.loading.damage import first_sentence
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.bridge import stated_context
from tlspectral.models.reading.packed import stored_weights
from tlspectral.models.running.cache_name import cache_name_hooks
from tlspectral.models.running.key_value_cache import (
    WithoutCache,
    beyond_rounding,
    generating_without_cache,
    generation_difference,
)

_CHECKED_TOKENS = 24
# Relative to the largest |log-probability|. Rounding in float32 was measured as 3e-7 on tiny models and 1.4e-6 on 30
# layers (SmolLM2-135M); a rope scaling left out gave 1e-3 to 0.2.
_TOLERANCE = 1e-4

OTHER_TOWERS = re.compile(r"(^|[._])(vision|visual|image|audio|speech)")
"""Matches names of tensors that belong to images or sound."""

_NUMBERED = re.compile(r"((?:.*?\.)??)(\d+)\.(.+)")  # prefix of a list of modules, index in it, name within
_POSITIONS = re.compile(r"(.*\.)?(rotary_emb\..*|[a-z_]*inv_freq)")
_MASK = re.compile(r"(.*\.)?(attn|attention)\.(bias|masked_bias|causal_mask)")
_FINAL_NORM = re.compile(r"(norm|ln_f|norm_f|ln_final|final_layer_norm|final_layernorm|final_norm)\.(weight|bias)")
_PREDICTION_LAYER = re.compile(r"(.*\.)?(eh_proj|shared_head)\..*")
_QUANTISED = re.compile(r".*\.(qweight|qzeros|SCB|absmax|quant_map|quant_state\..*|weight_scale(_inv)?|weight_packed)")
_SHOWN = 20


@torch.no_grad()
def log_probabilities(model: Any) -> Float64[Tensor, "1 pos d_vocab"] | None:
    """Return the log-probabilities of a model on 24 random tokens (seed 0), [1, pos, d_vocab] in float64 on the CPU.

    model: of TransformerLens or of transformers. It gets fewer tokens if its context is shorter. Returns None for a
    model in 16 bits, where rounding hides differences. Raises UnsupportedArchitecture if a float64 model cannot be run.
    """
    anchor = next(model.parameters())
    if anchor.dtype not in (torch.float32, torch.float64):
        return None
    if hasattr(model, "config"):
        # The part that reads text, in a model that also reads images.
        vocabulary, context = model.config.get_text_config().vocab_size, stated_context(model.config)
    else:
        vocabulary, context = model.cfg.d_vocab, model.cfg.n_ctx
    length = min(_CHECKED_TOKENS, context or _CHECKED_TOKENS)
    tokens = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    try:
        output = model(tokens.to(anchor.device))
    except RuntimeError as error:
        if anchor.dtype is not torch.float64:
            raise
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not run in float64 ({first_sentence(error)}): load it with dtype='float32'"
        ) from error
    return getattr(output, "logits", output).cpu().double().log_softmax(-1)


def sound_log_probabilities(model: Any, name: str) -> Float64[Tensor, "1 pos d_vocab"] | None:
    """Return a Hugging Face model's log-probabilities on 24 random tokens, in float64; None for a 16-bit model.

    name: the model's name in messages. Raises BadWeights if weights are NaN or infinite (the message names the first
    such tensor), or if only the log-probabilities are NaN.
    """
    logs = log_probabilities(model)
    if logs is not None and not bool(logs.isnan().any()):
        return logs
    # Weights are read only if log-probabilities are NaN or were not computed.
    for tensor, value in stored_weights(dict(model.named_parameters())).items():
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise BadWeights(
                f"{tensor} of {name}: {bad} of {value.numel()} values are NaN or infinite; load the checkpoint again"
            )
    if logs is not None:
        raise BadWeights(
            f"the log-probabilities of {name} are NaN although all of its weights are numbers, in transformers' own "
            "model; compare config.json with the published one"
        )
    return None


def require_agreement(model: Any, expected: Float64[Tensor, "1 pos d_vocab"] | None, what: str, advice: str) -> None:
    """Raise UnsupportedArchitecture if the model's log-probabilities differ from `expected` by more than rounding.

    It is also raised if the model cannot be run.

    expected: what `log_probabilities` returned for the original model; None checks nothing.
    what: beginning of the message, which names the checked model. advice: end of the message.
    """
    if expected is None:
        return
    try:
        actual, worst = log_probabilities(model), float("inf")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedArchitecture(f"{what} cannot be run ({reason}); {advice}") from error
    if actual is not None and actual.shape == expected.shape:
        worst = float((actual - expected).abs().max())
    if not worst <= _TOLERANCE * float(expected.abs().max()):
        raise UnsupportedArchitecture(
            f"{what} does not compute what the checkpoint does (log-probabilities differ by {worst:.1e}); {advice}"
        )


def avoid_lost_cache(model: Any) -> None:
    """Let a new model's attention fill its key/value cache; if a cached step still differs from an uncached pass, warn
    and switch the cache off.

    The first is done by permanent hooks (`cache_name_hooks`), if the cache is lost without them. After the second the
    model's methods `generate`, `generate_stream` and `hf_generate` run without a cache. A model that runs so already is
    skipped. Give only models that `load_model` has made, because models of the user must not be changed;
    `key_value_cache.prefill` checks every model.
    """
    view = attention_view(model)
    if isinstance(getattr(model, "generate", None), WithoutCache):
        return
    if not beyond_rounding(model, generation_difference(view)):
        return
    handles = [register(hook) for register, hook in cache_name_hooks(view)]
    difference = generation_difference(view)
    if not beyond_rounding(model, difference):
        return
    for handle in handles:
        handle.remove()
    vars(model).update(generating_without_cache(model))
    lens, transformers = version("transformer-lens"), version("transformers")
    warn_caller(
        f"{view.source['model']}: TransformerLens {lens} loses the key/value cache of this model, or its positions, "
        f"under transformers {transformers} (outputs after cached tokens differ from an uncached pass by a share of "
        f"{difference:.1e}). generate, generate_stream, hf_generate and tlspectral therefore run this model without a "
        "cache, which is correct but slower; do not pass a cache to the model yourself. To have the cache, try another "
        "version of TransformerLens"
    )


def require_filled(report: Mapping[str, Any], model: Any, name: str, stored: Iterable[str] = ()) -> None:
    """Raise BadWeights if the files lack weights of the model. name: the checkpoint's name in the message.

    report: what transformers reports about the load, a dict with `missing_keys` and `mismatched_keys`.
    stored: names of tensors in the files that fit no parameter. The message uses them to explain the failure.
    """
    lost = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if not lost:
        return
    other = [name for name in model.config.architectures or () if name != type(model).__name__]
    why = _wrapped(lost, stored) or "Fetch it again, or compare its config.json with the published one"
    if other:
        why = f"Its config.json describes a {other[0]}: load the language model that it was made from"
    raise BadWeights(
        f"{name} lacks {len(lost)} of the weights that its config asks for, such as {lost[0]}; they would be left "
        f"random. {why}"
    )


def _wrapped(parameters: Collection[str], stored: Iterable[str]) -> str:
    """Return advice if a wrapper (torch.compile, DDP, FSDP, peft) put words into tensor names, otherwise "".

    parameters: names of the model's parameters. stored: names of tensors in the files. A wrapper is recognised if all
    names with its words become names of parameters without them. The words may stand in front or in the middle.
    """
    names = [name.split(".") for name in stored]
    known = {word for parameter in parameters for word in parameter.split(".")}
    for name in names:
        starts = [at for at in range(1, len(name)) if ".".join(name[at:]) in parameters]
        front, within = name[: starts[0]] if starts else [], {word for word in name if word not in known}
        for words, without in (
            (front, [other[len(front) :] for other in names if other[: len(front)] == front]),
            (within, [[word for word in other if word not in within] for other in names if within & {*other}]),
        ):
            if words and all(".".join(rest) in parameters for rest in without):
                return (
                    f"The names in its files hold {'.'.join(words)}, such as {'.'.join(name)}, as a wrapper of the "
                    "model puts it there: save the model without the wrapper, or take it out of the names"
                )
    return ""


def _placed(model: nn.Module, names: Iterable[str], who: str) -> tuple[dict[str, str], dict[str, str]]:
    """Match the tensors of a checkpoint with the parameters of its model; return two dicts.

    1. Name of a tensor -> name of the parameter that is loaded from this tensor alone.
    2. Name of a tensor that fits no parameter -> the parameter's name that was looked for.

    Tensors that are joined into one parameter, such as the weights of single experts, are in neither dict.

    names: names of the stored tensors. They are changed as transformers changes them: older names, missing or extra
    prefixes. who: the checkpoint's name, for the error. Raises BadWeights if two tensors are loaded as the same weight.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    whole: Any = model
    rules = get_model_conversion_mapping(whole)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    base, parameters = whole.base_model_prefix, whole.state_dict()
    placed, unused, first = {}, {}, {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, base, parameters)
        if target not in parameters and name not in parameters:
            unused[name] = target
            continue
        if pattern is None:
            placed[name] = parameter = target if target in parameters else name
        else:  # one of several tensors of a parameter
            parameter = rename_source_key(name, renamings, [])[0].removeprefix(f"{base}.")
        other = first.setdefault(parameter, name)
        if other != name:
            raise BadWeights(
                f"{who}: its files hold {other} and {name}, and transformers loads both into {target}; remove the "
                "wrong one from the files"
            )
    return placed, unused


def require_tied(model: Any, who: str) -> None:
    """Raise BadWeights if config.json ties the unembedding to the embedding, and the two loaded weights differ.

    who: the model's name in the message.
    """
    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    if not _tied(model) or outside is None or outside.weight is inside.weight:
        return
    if not torch.equal(outside.weight, inside.weight):
        raise _not_tied(who)


def _require_fitting(
    model: nn.Module,
    placed: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    who: str,
) -> None:
    """Raise BadWeights if a tensor has not its parameter's shape, or if two tied embeddings have other values.

    model: the model of transformers, whose parameters give the shapes. placed: from name of a tensor to its parameter.
    shapes: from name of a tensor to its stored shape. read: function from name of a tensor to the tensor. who: the
    checkpoint's name in messages.
    """
    whole: Any = model
    parameters = whole.state_dict()
    for tensor, target in placed.items():
        expected = tuple(parameters[target].shape)
        if tensor in shapes and shapes[tensor] != expected:
            raise BadWeights(
                f"{tensor} of {who} has shape {shapes[tensor]}, and config.json asks for {expected}: fetch both again"
            )
    paths = {module: path for path, module in model.named_modules()}
    ends = {f"{paths.get(end)}.weight" for end in (whole.get_input_embeddings(), whole.get_output_embeddings())}
    stored = [tensor for tensor, target in placed.items() if target in ends and tensor in shapes]
    if _tied(whole) and len(stored) == 2 and not torch.equal(*map(read, stored)):
        raise _not_tied(who)


def _tied(model: Any) -> bool:
    """Return True if config and class of a model share one weight between embedding and unembedding."""
    return bool(getattr(model.config, "tie_word_embeddings", False) and getattr(model, "_tied_weights_keys", None))


def _not_tied(who: str) -> BadWeights:
    """Return the BadWeights error for a stored unembedding where the config ties it to the embedding.

    who: the model's name.
    """
    return BadWeights(
        f"{who}: config.json ties the unembedding to the embedding (tie_word_embeddings), and the files hold another "
        "unembedding; set tie_word_embeddings to false in config.json"
    )


def unused_weights(
    model: nn.Module,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    who: str,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[str]:
    """Return the names of a checkpoint's tensors that fit no parameter of its model and that the model does not need.

    Args:
        model: the model of transformers, with weights or on the meta device.
        names: names of all tensors in the files.
        read: function from name of a tensor to the tensor.
        who: the checkpoint's name in messages.
        shapes: from name of a tensor to its shape, to be compared with the parameters. Default: not compared, because a
            load follows that does it.

    Raises:
        BadWeights: an unused tensor is quantised; an unused floating-point tensor belongs to a decoder block, a further
            block or the final norm; two tensors are loaded into one parameter; or a shape does not fit.
    """
    whole: Any = model
    config, (placed, unused) = whole.config.get_text_config(), _placed(model, names, who)
    if shapes is not None:
        _require_fitting(model, placed, shapes, read, who)
    quantised = sorted(filter(_QUANTISED.fullmatch, unused))
    if quantised:
        raise BadWeights(
            f"{who} stores quantised weights ({quantised[0]} and {len(quantised) - 1} others), and config.json does "
            "not say so; load the model before quantisation"
        )
    base = f"{whole.base_model_prefix}."
    depth: dict[str, int] = {}  # number of blocks that the model has, by the prefix of their list
    for match in map(_NUMBERED.fullmatch, (name.removeprefix(base) for name in model.state_dict())):
        if match is not None and not OTHER_TOWERS.search(match[1]):
            depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)
    modules = {path.removeprefix(base): module for path, module in model.named_modules()}
    targets = {stored: target.removeprefix(base) for stored, target in unused.items()}
    extra = _prediction_blocks(targets.values(), depth, getattr(config, "num_nextn_predict_layers", 0) or 0)
    for stored, target in sorted(targets.items()):
        block = _block(target)
        if OTHER_TOWERS.search(target) or _POSITIONS.fullmatch(target) or block in extra:
            continue
        if not (_in_built_module(target, modules, depth) if block is None else block[0] in depth):
            continue
        value = read(stored)
        # A mask is a matrix of zeros and ones, or one number that stands for minus infinity.
        mask = value.numel() == 1 or (value.ndim >= 2 and bool(((value == 0) | (value == 1)).all()))
        if not value.is_floating_point() or (_MASK.fullmatch(target) and mask):
            continue
        if block is not None and block[1] >= depth[block[0]]:
            raise BadWeights(
                f"layer {block[1]} is in the files of {who} ({stored}), and config.json says that there are "
                f"{getattr(config, 'num_hidden_layers', 0)} layers; correct num_hidden_layers there"
            )
        wrapped = _wrapped(model.state_dict(), unused)
        raise BadWeights(
            f"{who}: its files hold {stored}, which fits no parameter of the model of config.json. "
            + (
                wrapped
                or "Without it another model would be measured. Correct config.json (model_type, biases, norms), or "
                "remove the tensor from the files if it is no part of the model"
            )
        )
    return list(unused)


def in_any_layer(tensor: str) -> str:
    """Return a tensor's name with N for the numbers of layers and experts: "h.3.attn" becomes "h.N.attn"."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", tensor)


def listed(unused: Iterable[str]) -> dict[str, Any]:
    """Return a dict: `count`, how many weights are unused, and `names`, up to 20 of their names with N for the layer.

    unused: names of the unused tensors.
    """
    names = list(unused)
    return {"count": len(names), "names": sorted(set(map(in_any_layer, names)))[:_SHOWN]}


def _block(target: str) -> tuple[str, int] | None:
    """Return (prefix of its list of layers, index), such as ("layers.", 3), for the parameter name `target`; None for a
    name without a number.
    """
    match = _NUMBERED.fullmatch(target)
    return None if match is None else (match[1], int(match[2]))


def _prediction_blocks(targets: Iterable[str], depth: Mapping[str, int], stated: int) -> set[tuple[str, int]]:
    """Return a set of (prefix of its list, index): stored blocks past the model's last, for further tokens only.

    targets: names of parameters that fit nowhere. depth: from prefix of a list of layers to the model's number of
    blocks in it. stated: number of such blocks in config.json. If there are at most `stated` further blocks, all of
    them count; otherwise only blocks with parameters that only such blocks have (`eh_proj`, `shared_head`).
    """
    beyond: dict[tuple[str, int], bool] = {}
    for target in targets:
        block = _block(target)
        if block is not None and block[1] >= depth.get(block[0], block[1] + 1):
            beyond[block] = beyond.get(block, False) or _PREDICTION_LAYER.fullmatch(target) is not None
    return {block for block, is_prediction in beyond.items() if is_prediction or len(beyond) <= stated}


def _in_built_module(target: str, modules: Mapping[str, nn.Module], depth: Mapping[str, int]) -> bool:
    """Return True if a tensor outside all blocks belongs to a built module without children, or is the final norm.

    target: name of the tensor. modules: the model's modules by name. depth: from prefix of a list of blocks to its
    length.
    """
    module = modules.get(target.rpartition(".")[0])
    if module is not None and "." in target and next(module.children(), None) is None:
        return True
    parents = {list_name.rstrip(".").rpartition(".")[0] for list_name in depth}
    return any(_FINAL_NORM.fullmatch(target.removeprefix(f"{parent}." if parent else "")) for parent in parents)
