"""Build a TransformerLens model from a Hugging Face model, and check that both compute the same.

TransformerLens 3.9 to 4.3 splits a packed projection wrongly into queries, keys and values in Falcon's newer decoder
(40B, 180B, Falcon 2), GPT-NeoX without biases and GPTBigCode without multi-query attention. For each key/value head,
the projection holds the queries that read it, its key and its value. TransformerLens splits Falcon's as if all queries
came first; it asserts that GPT-NeoX has biases, and that GPTBigCode has one key/value head. `correct_packed` corrects
these adapters when a model is built. An entry point in `transformer_lens.architectures` cannot do this: TransformerLens
ignores one with the name of a native adapter, and warns in every program that loads a bridge.
"""

from importlib.metadata import version
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.loading.building_hooked import build_hooked
from tlspectral.models.loading.checks import require_agreement, sound_log_probabilities
from tlspectral.models.loading.encoders import has_no_head, is_encoder_config
from tlspectral.models.reading.packed import packed_layers

_OTHER_MODEL = "Take another model, or a newer version of transformer-lens"
_ATTENTION = {"nemotron_h": "mixer", "recurrent_gemma": "temporal_block"}
# Names that other models have for the parts of a layer of Gemma 3n.
_GEMMA3N = {"self_attn": "attn", "input_layernorm": "ln1", "post_attention_layernorm": "ln1_post"}


def build_model(
    pretrained: Any, tokenizer: Any, name: str, backend: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the TransformerLens model of a Hugging Face model, on `device` with weights of `dtype`.

    The given model is taken apart and cannot be used afterwards.

    pretrained: model of transformers. tokenizer: its tokenizer, or None. name: its name. backend: "hooked", otherwise a
    bridge. Raises UnsupportedArchitecture, also if the two models compute different outputs; BadWeights for NaN.
    """
    lens = f"TransformerLens {version('transformer-lens')} makes of {name}"
    if backend == "hooked":
        if is_encoder_config(pretrained.config):
            raise UnsupportedArchitecture(
                f"{name} is an encoder, which HookedTransformer cannot hold: use backend='bridge'"
            )
        expected = sound_log_probabilities(pretrained, name)
        model = build_hooked(pretrained, tokenizer, name, dtype)
        require_agreement(model, expected, f"the HookedTransformer that {lens}", 'use backend="bridge"')
        return model.to(device, print_details=False)
    expected = sound_log_probabilities(pretrained.to(device), name)
    model = build_bridge(pretrained, tokenizer, name)  # takes the model apart, so its values are computed before
    require_agreement(model, expected, f"the bridge that {lens}", "try another version of TransformerLens")
    return model


def build_bridge(pretrained: Any, tokenizer: Any, name: str) -> Any:
    """Return a raw TransformerBridge around the Hugging Face model `pretrained`.

    The weights are not copied: the bridge holds `pretrained`, whose submodules are replaced in place. tokenizer: its
    tokenizer, or None. name: its name. Raises UnsupportedArchitecture if TransformerLens has no bridge for the model's
    class, or the bridge cannot hold the model.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    architecture, quantised = type(pretrained).__name__, next(iter(packed_layers(pretrained)), None)
    if architecture == "Gemma3nForCausalLM":
        _register_gemma3n_text()
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
        raise UnsupportedArchitecture(
            f"TransformerLens has no bridge for {name} ({architecture}): {str(error).rstrip('.')}. {_OTHER_MODEL}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        # Modules are not where the adapter looks, or packed weights do not split as it says.
        kind, reason = pretrained.config.model_type, " ".join(str(error).split())
        if quantised is not None:
            raise UnsupportedArchitecture(
                f"the bridge of TransformerLens cannot hold this {kind} model, {name}, with quantised weights, as of "
                f"{quantised}: it splits a projection that makes queries, keys and values at once, and needs its plain "
                "weight. Leave this projection out of the quantisation (llm_int8_skip_modules= of transformers, "
                "filter_fn= of torchao)"
            ) from error
        raise UnsupportedArchitecture(
            f"the bridge of TransformerLens cannot hold this {kind} model, {name} ({reason}). {_OTHER_MODEL}"
        ) from error
    return bridge.eval()


def _correct(adapter: Any, pretrained: Any) -> None:
    """Correct `adapter`, an architecture adapter of TransformerLens, in place, so that its bridge fits a Hugging Face
    model.

    pretrained: the Hugging Face model, not changed. Nothing is returned.
    """
    correct_packed(adapter, pretrained.config)
    if pretrained.config.model_type == "gemma3n_text":
        _hold_text(adapter)
    if (mixer := _ATTENTION.get(pretrained.config.model_type)) is not None:
        _hold_attention(adapter, mixer)
    if has_no_head(pretrained):
        for part in ("mlm_head", "ln_final", "unembed"):
            del adapter.component_mapping[part]
    # A part that this model lacks (None) is removed: the bridge would replace it by a module that cannot run.
    for part, component in list(adapter.component_mapping.items()):
        owner, _, name = (component.name or "").rpartition(".")
        if name and getattr(pretrained.get_submodule(owner), name, component) is None:
            del adapter.component_mapping[part]
            if part == "rotary_emb":
                adapter.cfg.positional_embedding_type = "none"


def _hold_attention(adapter: Any, name: str) -> None:
    """Add a bridge of attention to `adapter`, an architecture adapter, in place, for models with attention in some
    layers only.

    name: the attribute of a layer that holds its attention, or in other layers another module that mixes tokens.
    """
    from transformer_lens.model_bridge import generalized_components as parts
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    blocks, cfg, find = adapter.component_mapping["blocks"], adapter.cfg, adapter.get_remote_component
    projections: Any = {role: parts.LinearBridge(f"{role}_proj") for role in "qkvo"}
    held = {"attn": parts.AttentionBridge(name, cfg, projections, optional=True), **blocks.submodules}
    aliases = {"hook_attn_out": "attn.hook_out"}
    if name == "temporal_block":  # RecurrentGemma, whose norms and MLP have no bridge either
        held["ln1"] = parts.RMSNormalizationBridge("temporal_pre_norm", cfg)
        held["ln2"] = parts.RMSNormalizationBridge("channel_pre_norm", cfg)
        held["mlp"] = GeneralizedComponent("mlp_block", cfg)
        aliases["hook_mlp_out"] = "mlp.hook_out"
    else:
        held["mixer"].optional = True
    blocks.submodules = held
    blocks.hook_aliases = blocks.hook_aliases | aliases

    def _found(module: Any, path: str) -> Any:
        component = find(module, path)
        if path == name and not type(component).__name__.endswith("Attention"):
            raise AttributeError(path)  # TransformerLens then leaves the bridge of this layer's attention out
        return component

    adapter.get_remote_component = _found


def _register_gemma3n_text() -> None:
    """Register an architecture adapter in TransformerLens, by which Gemma 3n is bridged as a model of text.

    TransformerLens' own adapter needs the package timm for images.
    """
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory as Factory
    from transformer_lens.model_bridge.supported_architectures.gemma3n import Gemma3nArchitectureAdapter as Whole

    Factory.register_adapter("Gemma3nForCausalLM", type("Gemma3nTextAdapter", (Whole,), {"required_libraries": []}))


def _hold_text(adapter: Any) -> None:
    """Change the architecture adapter of Gemma 3n in place, so that it holds a model without image and audio parts.

    The parts of a layer get the names that they have in other models.
    """
    for component in adapter.component_mapping.values():
        component.name = component.name.replace("language_model.", "")
    blocks = adapter.component_mapping["blocks"]
    blocks.submodules = {_GEMMA3N.get(part.name, name): part for name, part in blocks.submodules.items()}
    blocks.hook_aliases = {**blocks.hook_aliases, "hook_attn_out": "ln1_post.hook_out"}


def correct_packed(adapter: Any, config: Any) -> None:
    """Correct in place how an architecture adapter splits a packed projection into queries, keys and values.

    It changes adapters of Falcon's newer decoder, GPT-NeoX without biases and GPTBigCode without multi-query attention;
    others stay. config: the model's config of transformers.
    """
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

    readers = n_heads // n_kv_heads

    def cut(packed: Float[Tensor, "features *d_model"], part: slice) -> nn.Parameter:
        by_group = rearrange(
            packed.detach(),
            "(kv_head part d_head) ... -> kv_head part d_head ...",
            kv_head=n_kv_heads,
            part=readers + 2,
        )
        chosen = by_group[:, part]
        return nn.Parameter(rearrange(chosen, "kv_head part d_head ... -> (kv_head part d_head) ...").clone())

    def split(attention: Any) -> list[nn.Linear]:
        packed = attention.c_attn if key_for_each else attention.query_key_value
        with torch.device("meta"):
            linears = [nn.Linear(1, 1, bias=False) for _ in range(3)]
        roles = slice(readers), slice(readers, readers + 1), slice(readers + 1, None)
        for linear, part in zip(linears, roles, strict=True):
            linear.weight = cut(packed.weight, part)
            linear.out_features, linear.in_features = linear.weight.shape
            if packed.bias is not None:
                linear.bias = cut(packed.bias, part)
        return linears

    parts = adapter.component_mapping["blocks"].submodules
    parts["attn"].split_qkv_matrix = split
    if newer_falcon and config.num_ln_in_parallel_attn == 1:
        parts["ln1"].name = "input_layernorm"
