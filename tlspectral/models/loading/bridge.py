"""A Hugging Face model as a TransformerBridge."""

from typing import Any

import torch

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.loading.packed import correct_packed


def build_bridge(pretrained: Any, tokenizer: Any, name: str) -> Any:
    """Return a raw TransformerBridge around a Hugging Face model, whose submodules it replaces in place.

    Raises:
        UnsupportedArchitecture: TransformerLens has no bridge for the model's class, or none that can hold it.
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
    """Correct an adapter before its bridge is built, in place."""
    correct_packed(adapter, pretrained.config)
    # A part that this model does not have (None) stays so: the bridge would put in its place a module that cannot run.
    for part, component in list(adapter.component_mapping.items()):
        owner, _, name = (component.name or "").rpartition(".")
        if name and getattr(pretrained.get_submodule(owner), name, component) is None:
            del adapter.component_mapping[part]
            if part == "rotary_emb":
                adapter.cfg.positional_embedding_type = "none"
