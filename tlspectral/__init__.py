"""Measure attention heads of TransformerLens models: spectra, detectors, ablations, edges and circuits.

    import tlspectral as tls

    model = tls.load_model("smollm2-135m")
    heads = tls.analyze_heads(model)

Names are imported when first used, so that `import tlspectral` loads neither torch nor TransformerLens.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlspectral.lazy import lazy_names
from tlspectral.models.loaders import LOADERS, Loader
from tlspectral.version import __version__ as __version__

if TYPE_CHECKING:
    from tlspectral.heads import (
        analyze_heads,
        compare_heads,
        detect_heads,
        frequency_table,
        head_directions,
        head_likeness,
        k_composition,
        qk_operators,
        relative_position_kernel,
        top_pairs,
        verify_scores,
    )
    from tlspectral.history import head_history
    from tlspectral.hooks import (
        Dictionary,
        ablate,
        ablation_hooks,
        ablation_sweep,
        cache_prices,
        edge_effects,
        faithfulness,
        ov_attribution,
        qk_attribution,
        run_circuit,
        scores,
        sufficient_heads,
    )
    from tlspectral.hooks import parts as parts
    from tlspectral.models.loading import load_model
    from tlspectral.positional import positional_symbolic
    from tlspectral.spectral_rope import SpectralHookedTransformer, to_spectral
    from tlspectral.tables import read_table, write_table
    from tlspectral.tasks import Task, evaluate, logit_difference

_SUBMODULES = {
    "algebra", "errors", "heads", "history", "hooks", "models", "plots", "positional", "report", "selection",
    "spectral_rope", "stats", "tables", "tasks",
}  # fmt: skip

__all__ = [
    "Dictionary",
    "SpectralHookedTransformer",
    "Task",
    "ablate",
    "ablation_hooks",
    "ablation_sweep",
    "analyze_heads",
    "cache_prices",
    "compare_heads",
    "detect_heads",
    "edge_effects",
    "evaluate",
    "faithfulness",
    "frequency_table",
    "head_directions",
    "head_history",
    "head_likeness",
    "k_composition",
    "load_model",
    "logit_difference",
    "ov_attribution",
    "positional_symbolic",
    "qk_attribution",
    "qk_operators",
    "read_table",
    "relative_position_kernel",
    "run_circuit",
    "scores",
    "sufficient_heads",
    "to_spectral",
    "top_pairs",
    "verify_scores",
    "write_table",
]


def _is_spectral(given: Any) -> bool:
    """Return whether an object is a spectral model, or a Path (folder or file) holds a saved one."""
    if not isinstance(given, Path):
        return hasattr(given, "spectral_parameters")
    if (given / "spectral_config.json").is_file():
        return True
    if (given / "config.json").is_file():  # a checkpoint of transformers
        return False
    return import_module("tlspectral.spectral_rope.spectral_file").spectral_file_of(given) is not None


# A loader on a floor above `models` is registered here, and imported when it loads a model.
LOADERS["spectral"] = Loader(
    _is_spectral,
    lambda given, **options: import_module("tlspectral.spectral_rope.loading").load_claimed(given, **options),
)

# It recognises no folder by itself: `load_model(weights="files")` uses it.
LOADERS["files"] = Loader(
    lambda at: False,
    lambda source: import_module("tlspectral.models.checkpoints.layers").opened_files(source),
)


_imported, _ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name, or a documented submodule such as `plots`, at its first use.

    `tls.parts` is the package `tlspectral.hooks.parts`.
    """
    if name in _SUBMODULES:
        return import_module(f"tlspectral.{name}")
    globals()[name] = import_module("tlspectral.hooks.parts") if name == "parts" else _imported(name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "parts"})
