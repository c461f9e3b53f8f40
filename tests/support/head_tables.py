"""Head tables of the zoo with small nulls: how they are made here, kept, compared, and their groups of columns."""

import functools

import numpy as np
import pandas as pd
import zoo

import tlspectral as tls
from tlspectral.algebra.nulls import NULL_COLUMNS
from tlspectral.heads.detectors import DETECTORS
from tlspectral.tables.head_columns import HEAD_COLUMNS

ALL = [column.name for column in HEAD_COLUMNS]
TEXTS = ["name", "status", "bilinear"]
COUNTS = ["layer", "head", "kv_head", "rank"]
BEHAVIOUR = [name + end for name in DETECTORS for end in ("", "_se")]
NULLS = [f"{name}_{what}" for name in NULL_COLUMNS for what in ("null_mean", "null_std", "z", "null_pct")]
BOUNDED = ["dir_frac", "D_head", "lam_mass", "henrici", "content_pos_frac"]
SCALE_FREE = [*BOUNDED, "imag_mass"]

built = zoo.shared
analyze = functools.partial(tls.analyze_heads, null_draws=20, detectors=False)


@functools.cache
def _table(backend, name):
    return analyze(built(backend, name))


def table_of(name, backend="bridge"):
    return _table(backend, name).copy()


def assert_same(found, expected, **tolerance):
    options = tolerance or {"check_exact": True}
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected.reset_index(drop=True), **options)


def dense_phase(name, layer):
    """theta [pairs], as the architecture's paper has it; norms of Re M_t and Im M_t, [heads, pairs], from d x d."""
    k = layer.w_q.shape[2]
    turning = k // 4 if name == "neox" else k
    half = turning // 2
    theta = 10000.0 ** (-2.0 * np.arange(half) / turning)
    w_q, w_k = (w[..., :half] + 1j * w[..., half:turning] for w in (layer.w_q, layer.w_k))
    m = np.einsum("hit,hjt->htij", w_q, w_k.conj())
    return theta, np.linalg.norm(m.real, axis=(2, 3)), np.linalg.norm(m.imag, axis=(2, 3))
