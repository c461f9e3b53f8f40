"""Ablations by forward hooks (parts of heads, edges, circuits), sweeps over heads, and one score written as a sum."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.hooks.ablation import ablate, ablation_hooks
    from tlspectral.hooks.attribution.dictionary import Dictionary
    from tlspectral.hooks.attribution.ov_attribution import ov_attribution
    from tlspectral.hooks.attribution.qk_attribution import qk_attribution
    from tlspectral.hooks.attribution.score_matrix import scores
    from tlspectral.hooks.baking import bake
    from tlspectral.hooks.circuits.circuit import faithfulness, run_circuit
    from tlspectral.hooks.head_wall import wall
    from tlspectral.hooks.hook_check import check_hook
    from tlspectral.hooks.measured_wall import Wall
    from tlspectral.hooks.path_patching import edge_effects
    from tlspectral.hooks.screening import missed_edges
    from tlspectral.hooks.short_caches import cache_prices
    from tlspectral.hooks.sufficient.sufficient_heads import sufficient_heads
    from tlspectral.hooks.sweeps.bands import band_effects
    from tlspectral.hooks.sweeps.summary import summarize_sweep
    from tlspectral.hooks.sweeps.sweep import ablation_sweep
    from tlspectral.selection.receivers_as_written import receivers

__all__ = [
    "Dictionary",
    "Wall",
    "ablate",
    "ablation_hooks",
    "ablation_sweep",
    "bake",
    "band_effects",
    "cache_prices",
    "check_hook",
    "edge_effects",
    "faithfulness",
    "missed_edges",
    "ov_attribution",
    "qk_attribution",
    "receivers",
    "run_circuit",
    "scores",
    "sufficient_heads",
    "summarize_sweep",
    "wall",
]

__getattr__, __dir__ = lazy_names(__name__)
"""Names are imported at first use, because `ablate` alone needs neither tasks nor statistics."""
