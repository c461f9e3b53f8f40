"""Figures of tables and of a model's heads. Each function returns a matplotlib Figure, which a notebook shows.

A figure with one panel accepts `ax`, matplotlib Axes to draw into, and returns their figure. A figure with several
panels arranges them itself and has no `ax`.
"""

from tlspectral.errors import require_package

require_package("matplotlib", "A figure", '"tlspectral[plots]"')

from tlspectral.plots.attention_maps import patterns
from tlspectral.plots.attribution import qk_attribution
from tlspectral.plots.circuits import circuit, faithfulness
from tlspectral.plots.complex_plane import eigenvalues
from tlspectral.plots.content_direction import plane
from tlspectral.plots.effects import ablation_effects, kernel
from tlspectral.plots.head_map import heads
from tlspectral.plots.heads_on_sentence import wall
from tlspectral.plots.positional_planes import exclusion_plane, positional_symbolic_plane
from tlspectral.plots.rotary_plane import rotary_plane

__all__ = [
    "ablation_effects",
    "circuit",
    "eigenvalues",
    "exclusion_plane",
    "faithfulness",
    "heads",
    "kernel",
    "patterns",
    "plane",
    "positional_symbolic_plane",
    "qk_attribution",
    "rotary_plane",
    "wall",
]


def __dir__() -> list[str]:
    return __all__
