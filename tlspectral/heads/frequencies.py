"""`frequency_table`: size of phase and of even content of every head at every rotary frequency, from weights."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from tlspectral.algebra.rotary import phase_norms
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.models.reading import measured
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.measurement import stacked
from tlspectral.tables.schema import Schema, columns

FREQUENCY_TABLE = Schema(
    "frequency_table",
    (
        *HEAD,
        *columns("""
            frequency  | index                   | Index t of the rotary pair; 0 is the model's first pair.
            theta      | rad/token               | Angle by which the pair rotates per token in the model as it is now.
            wavelength | token                   | Tokens per full rotation: 2 pi / theta; inf at theta 0.
            re_norm    | score x attention scale | ||Re M_t||: the content of the pair that is even in the offset.
            im_norm    | score x attention scale | ||Im M_t||: the content of the pair that is odd in the offset.
            im_share   | share                   | im_norm / (re_norm + im_norm).
        """),
    ),
    "`tls.frequency_table`",
)


def frequency_table(model: Any) -> pd.DataFrame:
    """Return the norms of Re M_t and Im M_t for every head and rotary pair ("Fingerprint, Not Blueprint", section 7).

    Use it to see at which frequencies a head's phase lies.

    >>> import tlspectral as tls
    >>> table = tls.frequency_table(tls.load_model("tiny-rope"))
    >>> table.loc[table["name"] == "L0H3", "wavelength"].round().tolist()[:4]
    [6.0, 20.0, 63.0, 199.0]

    M_t is the head's complex query-key matrix at rotary pair t. Its imaginary part is the phase.

    Args:
        model: a TransformerBridge or HookedTransformer.

    Returns:
        DataFrame with a row per head and rotary pair, sorted by layer, head and frequency; layers without rotary
        positions have no rows. Columns: `layer, head, name, frequency, theta, wavelength, re_norm, im_norm, im_share`.
        `frequency` is the pair's index (0: the model's first), `theta` its angle per token in radians, `wavelength` is
        2 pi / theta in tokens, `im_share` is im_norm / (re_norm + im_norm). Norms are Frobenius norms, in the unit of
        scores before division by the attention scale (sqrt(d_head)). `attrs` hold where the model came from, with
        hashes of its weights, and `rotary_valid_up_to`, the longest valid prompt.

    Raises:
        UnsupportedArchitecture: no layer of the model has rotary positions, or a layer cannot be read.
        ScoreMismatch: a rotary module or table was edited so that pairs do not rotate by one angle per token.

    Not established: that inputs use a frequency, or that a head needs it.
    """
    with measured(model, report_hooks=False) as view:
        layer_tables, limits = [], []
        for index in view.layers:
            rotary = view.rotary(index)
            if rotary is None:
                continue
            layer = view.layer(index)
            norms = phase_norms(*layer.operator_factors(), rotary)
            heads, pairs = norms.re.shape
            theta = rotary.theta.expand(heads, -1).flatten().numpy()
            re, im = norms.re.flatten().numpy(), norms.im.flatten().numpy()
            with np.errstate(divide="ignore", invalid="ignore"):
                wavelength, share = 2 * np.pi / np.abs(theta), im / (re + im)
            rows = pd.MultiIndex.from_product(
                [[index], range(heads), range(pairs)], names=["layer", "head", "frequency"]
            ).to_frame(index=False)
            layer_tables.append(rows.assign(theta=theta, wavelength=wavelength, re_norm=re, im_norm=im, im_share=share))
            if layer.valid_up_to is not None:
                limits.append(layer.valid_up_to)
        if not layer_tables:
            raise UnsupportedArchitecture(
                f"none of the {len(view.layers)} layers has rotary positions: frequency_table needs a model with RoPE, "
                "such as tls.load_model('tiny-rope')"
            )
        limit = min(limits) if limits else None
        return FREQUENCY_TABLE.frame(
            stacked(layer_tables), {**view.origin(), "rotary_valid_up_to": limit, "torch": torch.__version__}
        )
