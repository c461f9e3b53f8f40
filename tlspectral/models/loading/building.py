"""A model on the hub, in a folder or in a GGUF file, and any Hugging Face model, made into a TransformerLens model.

TransformerLens 3.9 to 4.3 cuts queries, keys and values wrongly out of one packed projection in Falcon's newer decoder
(40B, 180B, Falcon 2), GPT-NeoX without biases and GPTBigCode without multi-query attention. The projection holds, one
key/value head after the other, the queries that read it, its key and its value. TransformerLens cuts that of Falcon as
if all queries came first, asserts that the second has biases and that the third has one key/value head. These adapters
are corrected when a model is built. The entry-point group `transformer_lens.architectures` cannot serve for it: an
entry point with the name of a native adapter is passed over, with a warning in every program that loads a bridge.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.loading import gguf
from tlspectral.models.loading.agreement import log_probabilities, require_agreement, require_numbers
from tlspectral.models.loading.bars import quiet
from tlspectral.models.loading.damage import misfit, refusing
from tlspectral.models.loading.hooked import build_hooked, hooked_transformer_class
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import load_pretrained
from tlspectral.models.loading.source import Source


def load_from_files(
    source: Source, backend: str, device: torch.device, dtype: torch.dtype, tokenizer: Any = None
) -> Any:
    """Return the model of a source, which is not a packaged one, with its provenance; arguments as of `load_model`."""
    if backend == "hooked":
        hooked_transformer_class()  # raises on TransformerLens 4, before minutes of loading
    with copied_tokenizer(tokenizer) as given:
        if source.kind == "adapter":
            from tlspectral.models.loading.adapters import load_merged

            pretrained, tokenizer, record = load_merged(source, dtype, given)
        else:
            pretrained, tokenizer, record = load_whole(source, dtype, given)
        with refusing(misfit(record)):
            model = build_model(pretrained, tokenizer, record["model"], backend, device, dtype)
    model.tlspectral_source = record
    return model


def load_whole(source: Source, dtype: torch.dtype, tokenizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the Hugging Face model of a hub model, folder or GGUF file, its tokenizer or None, and its provenance."""
    if source.kind == "gguf":
        folder, digest = gguf.converted_folder(source)
        record = {**source.record, "sha256": digest}
        source = replace(source, kind="folder", location=str(folder), record=record)
    if source.kind == "hub":
        source = pinned(source)
    pretrained, tokenizer, left_out = load_pretrained(source, dtype, tokenizer)
    return pretrained, tokenizer, source.record | left_out


def build_model(
    pretrained: Any, tokenizer: Any, name: str, backend: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the TransformerLens model of a Hugging Face model, which is taken apart. Raises as `load_model`."""
    if backend == "hooked":
        return build_hooked(pretrained, tokenizer, name, dtype).to(device, print_details=False)
    expected = log_probabilities(pretrained.to(device))
    require_numbers(pretrained, expected, name)
    model = build_bridge(pretrained, tokenizer, name)  # takes the model apart, so its values are computed before
    subject = f"the bridge that TransformerLens {version('transformer-lens')} makes of {name}"
    require_agreement(model, expected, subject, "try another version of TransformerLens")
    return model


@contextlib.contextmanager
def copied_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Yield a copy of a caller's tokenizer, from which a model can be built until the context ends; None for None.

    TransformerLens changes the tokenizer that it is given, and loads it again by its name, which would use the network
    for a hub id and lose tokens that were added. The copy has the name of a temporary folder. Raises TypeError for
    what is no tokenizer of transformers.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if tokenizer is None:
        yield None
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer= takes a tokenizer of transformers, and found {type(tokenizer).__name__}")
    with tempfile.TemporaryDirectory(prefix="tlspectral-") as folder:
        with quiet():
            tokenizer.save_pretrained(folder)
            copied = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        yield copied


def build_bridge(pretrained: Any, tokenizer: Any, name: str) -> Any:
    """Return a raw TransformerBridge around a Hugging Face model, whose submodules it replaces in place.

    Raises UnsupportedArchitecture if TransformerLens has no bridge for the model's class, or none that can hold it.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    architecture = type(pretrained).__name__
    try:
        bridge = build_bridge_from_module(
            pretrained,
            architecture,
            hf_config=pretrained.config,
            tokenizer=tokenizer,
            model_name=name,
            post_adapter_hook=lambda adapter: _correct(adapter, pretrained),
        )
    except ValueError as error:
        raise UnsupportedArchitecture(f"TransformerLens has no bridge for {name} ({architecture}): {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        # Modules that are not where the adapter looks, or packed weights that do not split as it says.
        kind, reason = pretrained.config.model_type, " ".join(str(error).split())
        raise UnsupportedArchitecture(
            f"the bridge of TransformerLens cannot hold this {kind} model, {name} ({reason})"
        ) from error
    return bridge.eval()


def _correct(adapter: Any, pretrained: Any) -> None:
    """Correct TransformerLens' adapter before its bridge is built, in place."""
    correct_packed(adapter, pretrained.config)
    # A part that this model does not have (None) stays so: the bridge would put in its place a module that cannot run.
    for part, component in list(adapter.component_mapping.items()):
        owner, _, name = (component.name or "").rpartition(".")
        if name and getattr(pretrained.get_submodule(owner), name, component) is None:
            del adapter.component_mapping[part]
            if part == "rotary_emb":
                adapter.cfg.positional_embedding_type = "none"


def correct_packed(adapter: Any, config: Any) -> None:
    """Correct how an adapter cuts a packed projection, in place. That of other models is left as it is."""
    newer_falcon = config.model_type == "falcon" and config.new_decoder_architecture
    without_bias = config.model_type == "gpt_neox" and not config.attention_bias
    key_for_each = config.model_type == "gpt_bigcode" and not config.multi_query
    if not (newer_falcon or without_bias or key_for_each):
        return
    n_heads = int(config.num_attention_heads)
    n_kv_heads = int(config.num_kv_heads) if newer_falcon else n_heads
    if not without_bias:
        adapter.cfg.n_key_value_heads = n_kv_heads
        for side in ("k", "v"):
            name = f"blocks.{{i}}.attn.{side}"
            for key in (name, f"{name}.weight"):
                conversion = adapter.weight_processing_conversions.get(key)
                if conversion is not None:
                    conversion.tensor_conversion.axes_lengths["n"] = n_kv_heads

    def split(attention: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        packed = attention.c_attn if key_for_each else attention.query_key_value
        weights = _parts(packed.weight, n_heads, n_kv_heads)
        biases = (None, None, None) if packed.bias is None else _parts(packed.bias, n_heads, n_kv_heads)
        query, key, value = (_linear(*both) for both in zip(weights, biases, strict=True))
        return query, key, value

    parts = adapter.component_mapping["blocks"].submodules
    parts["attn"].split_qkv_matrix = split
    if newer_falcon and config.num_ln_in_parallel_attn == 1:
        parts["ln1"].name = "input_layernorm"


def _parts(
    packed: Float[Tensor, "features *d_model"], n_heads: int, n_kv_heads: int
) -> tuple[
    Float[Tensor, "query_features *d_model"],
    Float[Tensor, "key_features *d_model"],
    Float[Tensor, "key_features *d_model"],
]:
    readers = n_heads // n_kv_heads
    by_group = packed.detach().unflatten(0, (n_kv_heads, readers + 2, -1))
    query, key, value = (
        by_group[:, part].reshape(-1, *packed.shape[1:]).clone() for part in (slice(readers), readers, readers + 1)
    )
    return query, key, value


def _linear(weight: Float[Tensor, "out d_model"], bias: Float[Tensor, "out"] | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
