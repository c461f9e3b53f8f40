"""The spectrum of attention heads, on TransformerLens.

    import tlspectral as tls

    model = tls.load_model("smollm2-135m")
    heads = tls.analyze_heads(model)

Names are imported when first used, so that `import tlspectral` loads neither torch nor TransformerLens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tlspectral.version import __version__ as __version__

if TYPE_CHECKING:
    from tlspectral.ablation import ablation_sweep, band_effects, summarize_sweep
    from tlspectral.composition import copying_scores, k_composition
    from tlspectral.detectors import detect_heads, relative_position_kernel
    from tlspectral.heads import (
        analyze_heads,
        compare_heads,
        frequency_table,
        head_card,
        head_directions,
        weight_noise_band,
    )
    from tlspectral.history import head_history
    from tlspectral.hooks import ablate, ablation_hooks
    from tlspectral.models.loading import load_model
    from tlspectral.operators import qk_operators, qk_penalty, verify_scores
    from tlspectral.positional import BlockPrompt, BlockTask, positional_symbolic, positional_symbolic_profile
    from tlspectral.spectral_rope import SpectralHookedTransformer, SpectralRoPE, to_spectral
    from tlspectral.stats import (
        attenuation,
        layer_bootstrap,
        model_permutation_test,
        partial_spearman,
        top_head_percentile,
    )
    from tlspectral.tables import read_table, write_table
    from tlspectral.tasks import Task, evaluate, induction_loss, language_loss, logit_difference
    from tlspectral.wiring import edge_effects, qk_attribution


_ROOMS = {
    "ablation": ("ablation_sweep", "band_effects", "summarize_sweep"),
    "composition": ("copying_scores", "k_composition"),
    "detectors": ("detect_heads", "relative_position_kernel"),
    "heads": (
        "analyze_heads",
        "compare_heads",
        "frequency_table",
        "head_card",
        "head_directions",
        "weight_noise_band",
    ),
    "history": ("head_history",),
    "hooks": ("ablate", "ablation_hooks"),
    "models.loading": ("load_model",),
    "operators": ("qk_operators", "qk_penalty", "verify_scores"),
    "positional": ("BlockPrompt", "BlockTask", "positional_symbolic", "positional_symbolic_profile"),
    "spectral_rope": ("SpectralHookedTransformer", "SpectralRoPE", "to_spectral"),
    "stats": ("attenuation", "layer_bootstrap", "model_permutation_test", "partial_spearman", "top_head_percentile"),
    "tables": ("read_table", "write_table"),
    "tasks": ("Task", "evaluate", "induction_loss", "language_loss", "logit_difference"),
    "wiring": ("edge_effects", "qk_attribution"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}
_SUBMODULES = {*_ROOMS, "errors", "models", "nulls", "plots", "report", "rotary", "spectra", "studies"}

__all__ = [
    "BlockPrompt",
    "BlockTask",
    "SpectralHookedTransformer",
    "SpectralRoPE",
    "Task",
    "ablate",
    "ablation_hooks",
    "ablation_sweep",
    "analyze_heads",
    "attenuation",
    "band_effects",
    "compare_heads",
    "copying_scores",
    "detect_heads",
    "edge_effects",
    "evaluate",
    "frequency_table",
    "head_card",
    "head_directions",
    "head_history",
    "induction_loss",
    "k_composition",
    "language_loss",
    "layer_bootstrap",
    "load_model",
    "logit_difference",
    "model_permutation_test",
    "partial_spearman",
    "positional_symbolic",
    "positional_symbolic_profile",
    "qk_attribution",
    "qk_operators",
    "qk_penalty",
    "read_table",
    "relative_position_kernel",
    "summarize_sweep",
    "to_spectral",
    "top_head_percentile",
    "verify_scores",
    "weight_noise_band",
    "write_table",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a documented submodule such as `plots`, when it is first asked for."""
    if name in _SUBMODULES:
        return import_module(f"tlspectral.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tlspectral' has no attribute {name!r}")
    value = getattr(import_module(f"tlspectral.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
