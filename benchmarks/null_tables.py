"""Head tables with a known truth, many at once, and correlations over all of them in one pass.

Arrays are [tables, layers, heads], or [tables, heads of the model] once layers do not matter. A column is Gaussian with
a share of variance common to a layer, to a group of heads in a layer, and to neighbouring layers; `prev` is its
exponential, as skewed as in the published tables. The correlations are those of `tlspectral.stats` without its care for
ties and missing values; `tests/test_error_rates.py` compares them table by table.
"""

from dataclasses import dataclass

import numpy as np
import scipy.stats

SHAPES = ((12, 12), (24, 16), (30, 9))  # layers and heads of GPT-2, Pythia-410m and SmolLM2-135M
_CONTROL = 0.5  # slope of x and y on the control
_SKEW = 0.9  # of the logarithm of prev: skewness 3 to 5, as published


@dataclass(frozen=True)
class Likeness:
    """What heads have in common.

    Attributes:
        layer: share of variance that the heads of a layer share (intra-class correlation).
        group: share that neighbouring heads of a layer share in groups of three or four, as under one key/value head.
        neighbour: correlation of what a layer shares with that of the next layer.
    """

    name: str
    layer: float = 0.0
    group: float = 0.0
    neighbour: float = 0.0


INDEPENDENT = Likeness("independent")
ALIKE = Likeness("alike, 0.2", layer=0.2)
VERY_ALIKE = Likeness("alike, 0.4", layer=0.4)
GROUPS = Likeness("alike, 0.2, and key/value groups, 0.4", layer=0.2, group=0.4)
DEPTH = Likeness("alike, 0.4, and layers alike their neighbours, 0.7", layer=0.4, neighbour=0.7)
LIKENESSES = (INDEPENDENT, ALIKE, VERY_ALIKE, GROUPS, DEPTH)


def column(rng: np.random.Generator, tables: int, shape: tuple[int, int], likeness: Likeness) -> np.ndarray:
    """Draw a column of mean 0 and variance 1, [tables, layers, heads]."""
    layers, heads = shape
    of_layer = rng.standard_normal((tables, layers))
    for layer in range(1, layers):
        fresh = np.sqrt(1 - likeness.neighbour**2) * of_layer[:, layer]
        of_layer[:, layer] = likeness.neighbour * of_layer[:, layer - 1] + fresh
    size = 4 if heads % 4 == 0 else 3
    of_group = rng.standard_normal((tables, layers, heads // size)).repeat(size, axis=2)
    own = 1 - likeness.layer - likeness.group
    drawn = np.sqrt(own) * rng.standard_normal((tables, layers, heads)) + np.sqrt(likeness.group) * of_group
    return drawn + np.sqrt(likeness.layer) * of_layer[:, :, None]


def columns(
    rng: np.random.Generator, tables: int, shape: tuple[int, int], likeness: Likeness, correlation: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw x, y and a control that acts on both; `correlation` is that of x and log y once the control is fixed."""
    control, x, own = (column(rng, tables, shape, likeness) for _ in range(3))
    y = correlation * x + np.sqrt(1 - correlation**2) * own
    scale = np.sqrt(1 + _CONTROL**2)
    return x + _CONTROL * control, np.exp(_SKEW * (y + _CONTROL * control) / scale), control


def flat(values: np.ndarray) -> np.ndarray:
    """Put the heads of all layers side by side: [tables, heads of the model]."""
    return values.reshape(len(values), -1)


def without(values: np.ndarray, controls: list[np.ndarray], weights: np.ndarray) -> np.ndarray:
    """Residuals of weighted least squares with intercept; all [tables, heads], weights [heads]."""
    total = weights.sum()
    values = values - (values @ weights / total)[:, None]
    used: list[np.ndarray] = []
    for control in controls:  # made orthogonal one after another
        control = control - (control @ weights / total)[:, None]
        for earlier in used:
            control = control - earlier * _slope(control, earlier, weights)
        used.append(control)
        values = values - control * _slope(values, control, weights)
    return values


def _slope(values: np.ndarray, control: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (((values * control) @ weights) / ((control * control) @ weights))[:, None]


def ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mid-ranks where head h is there `weights[h]` times; no two heads are tied."""
    order = np.argsort(values, axis=1)
    of_order = weights[order]
    ranked = np.empty_like(values)
    np.put_along_axis(ranked, order, of_order.cumsum(1) - (of_order - 1) / 2, axis=1)
    return ranked


def pearson(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted correlation of each table, [tables]."""
    x, y = (values - (values @ weights / weights.sum())[:, None] for values in (x, y))
    return ((x * y) @ weights) / np.sqrt(((x * x) @ weights) * ((y * y) @ weights))


def partial_correlations(
    x: np.ndarray, y: np.ndarray, controls: list[np.ndarray], method: str, weights: np.ndarray | None = None
) -> np.ndarray:
    """`partial_spearman(...).statistic` of each table."""
    weights = np.ones(x.shape[1]) if weights is None else weights
    if method == "rank":
        x, y, *controls = (ranks(values, weights) for values in (x, y, *controls))
    x, y = (without(values, controls, weights) for values in (x, y))
    if method == "hybrid":
        x, y = ranks(x, weights), ranks(y, weights)
    return pearson(x, y, weights)


def student(correlations: np.ndarray, freedom: int) -> np.ndarray:
    """Two-sided p of correlations."""
    return 2 * scipy.stats.t.sf(np.abs(correlations) * np.sqrt(freedom / (1 - correlations**2)), freedom)


def within_layers(x: np.ndarray, y: np.ndarray, control: np.ndarray, method: str) -> np.ndarray:
    """`partial_spearman(..., layers=).pvalue` of each table; x, y and control are [tables, layers, heads]."""
    shape, ones = x.shape, np.ones(x.shape[1] * x.shape[2])
    if method == "rank":
        x, y, control = (ranks(flat(values), ones).reshape(shape) for values in (x, y, control))
    x, y, control = (values - values.mean(2, keepdims=True) for values in (x, y, control))
    x, y = (without(flat(values), [flat(control)], ones).reshape(shape) for values in (x, y))
    if method == "hybrid":
        x, y = (ranks(flat(values), ones).reshape(shape) for values in (x, y))
        x, y = (values - values.mean(2, keepdims=True) for values in (x, y))
    return scipy.stats.ttest_1samp((x * y).sum(2), 0, axis=1).pvalue


def resampled(
    x: np.ndarray, y: np.ndarray, controls: list[np.ndarray], method: str, layers: int, draws: int, seed: int = 0
) -> np.ndarray:
    """Partial correlations in the resamples of layers that `layer_bootstrap` draws, [tables, draws]."""
    drawn = np.random.default_rng(seed).integers(layers, size=(draws, layers))
    times = [np.bincount(chosen, minlength=layers) for chosen in drawn]
    return np.stack([_weighted(x, y, controls, method, of_layers) for of_layers in times], axis=1)


def without_layers(x: np.ndarray, y: np.ndarray, controls: list[np.ndarray], method: str, layers: int) -> np.ndarray:
    """Partial correlations without each layer, [tables, layers]."""
    return np.stack([_weighted(x, y, controls, method, times) for times in 1 - np.eye(layers)], axis=1)


def _weighted(x: np.ndarray, y: np.ndarray, controls: list[np.ndarray], method: str, times: np.ndarray) -> np.ndarray:
    """Partial correlations with each layer there so many times."""
    weights = times.repeat(x.shape[1] // len(times)).astype(float)
    x, y, *controls = (values[:, weights > 0] for values in (x, y, *controls))
    return partial_correlations(x, y, controls, method, weights[weights > 0])
