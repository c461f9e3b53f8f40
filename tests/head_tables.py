"""Head tables of the zoo with small nulls: how they are made here, kept, compared, and their groups of columns."""

import functools

import numpy as np
import pandas as pd
import zoo

import tlspectral as tls
from tlspectral.detectors import DETECTORS
from tlspectral.nulls import NULL_COLUMNS
from tlspectral.tables import HEAD_COLUMNS

ALL = [column.name for column in HEAD_COLUMNS]
TEXTS = ["name", "status", "bilinear"]
COUNTS = ["layer", "head", "kv_head", "rank"]
BEHAVIOUR = [name + end for name in DETECTORS for end in ("", "_se")]
NULLS = [f"{name}_{what}" for name in NULL_COLUMNS for what in ("null_mean", "null_std", "z", "null_pct")]
BOUNDED = ["dir_frac", "D_head", "lam_mass", "henrici", "content_pos_frac"]
SCALE_FREE = [*BOUNDED, "imag_mass"]


def analyze(model, **arguments):
    return tls.analyze_heads(model, **{"null_draws": 20, "detectors": False, "show_progress": False, **arguments})


@functools.cache
def built(backend, name):
    return getattr(zoo, backend)(name)


@functools.cache
def _table(backend, name):
    return analyze(built(backend, name))


def table_of(name, backend="bridge"):
    return _table(backend, name).copy()


def assert_same(found, expected, **tolerance):
    options = tolerance or {"check_exact": True}
    pd.testing.assert_frame_equal(found.reset_index(drop=True), expected.reset_index(drop=True), **options)


def dense_pairs(name, layer):
    """Pairs of columns that turn together, and their angles per token, as the architecture's paper has them."""
    k = layer.w_q.shape[2]
    turning = k // 4 if name == "neox" else k
    base = 10000.0
    theta = base ** (-2.0 * np.arange(turning // 2) / turning)
    return theta, [(t, t + turning // 2) for t in range(turning // 2)]


def dense_phase(name, layer):
    """theta [pairs]; norms of Re M_t and Im M_t, [heads, pairs], from d x d matrices."""
    theta, pairs = dense_pairs(name, layer)
    re, im = np.zeros((2, len(layer.w_q), len(pairs)))
    for head, (w_q, w_k) in enumerate(zip(layer.w_q, layer.w_k, strict=True)):
        for t, (real, imaginary) in enumerate(pairs):
            m_t = np.outer(w_q[:, real] + 1j * w_q[:, imaginary], np.conj(w_k[:, real] + 1j * w_k[:, imaginary]))
            re[head, t], im[head, t] = np.linalg.norm(m_t.real), np.linalg.norm(m_t.imag)
    return theta, re, im
