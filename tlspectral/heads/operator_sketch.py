"""A small record of a model's operators, to compare models that are not in memory at the same time."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from tlspectral.algebra.nulls import one_thread
from tlspectral.heads.likeness import LEAST_SHARE, TWINS
from tlspectral.heads.operator_blocks import read_operators
from tlspectral.selection.node_names import head_name

if TYPE_CHECKING:
    from tlspectral.heads.operator_blocks import Source

_PROBES = 256  # their products are likenesses up to an error of some .06
_BEYOND_NOISE = 5.0  # standard errors


def operator_sketch(source: Source) -> pd.DataFrame:
    """Return a small record of the operators of each head, from which `same_basis` estimates likenesses.

    A head has 256 numbers u M v, with the same random vectors u and v for all heads, summed over rotary pairs by
    falling frequency with random phases, and 256 of W_V W_O. Both have mean square 1 for a random operator; a head
    without weights has 0. The table has `layer, head, sketch` (the numbers in float32, as base64).
    """
    rows = []
    with one_thread():
        operators = read_operators(source)
        generator = torch.Generator().manual_seed(0)
        u, v = torch.randn(2, _PROBES, operators.d_model, generator=generator, dtype=torch.float64)
        most = max(len(block.frequencies) for block in operators.blocks)
        phases = 2 * torch.pi * torch.rand(_PROBES, most, generator=generator, dtype=torch.float64)
        for block in operators.blocks:
            left, right = block.rest
            values = ((u @ left) * (v @ right.mT)).sum(2)
            if pairs := len(block.frequencies):
                turns = torch.polar(torch.full_like(phases, 2**0.5), phases)[:, :pairs]
                products = (u.to(block.q.dtype) @ block.q.mT) * (v.to(block.k.dtype) @ block.k[block.keys].mT).conj()
                values = values + (products * turns).real.sum(2)
            w_v, w_o = block.output
            sketches = values / block.norms[0][:, None], ((u @ w_v) * (v @ w_o.mT)).sum(2) / block.norms[1][:, None]
            rows.extend(torch.cat(sketches, dim=1).nan_to_num().to(torch.float32).numpy())
    table = pd.DataFrame(operators.heads, columns=["layer", "head"])
    return table.assign(sketch=[b64encode(row.tobytes()).decode() for row in rows])


def same_basis(a: pd.DataFrame, b: pd.DataFrame) -> tuple[bool, dict[str, str]]:
    """Return whether two records of `operator_sketch` show one basis, and which heads of a moved to another index in b.

    One basis: the mean likeness of heads of equal index is five standard errors above 0, or 5 % of the heads moved.
    Moved: a head whose nearest head in b has another index, a likeness above .5, and this head as its own nearest.
    """
    of_a, of_b = (
        np.stack([np.frombuffer(b64decode(row), dtype=np.float32) for row in table["sketch"]]).astype(float)
        for table in (a, b)
    )
    likeness = of_a @ of_b.T / of_a.shape[1]
    names_a, names_b = (list(map(head_name, table["layer"], table["head"])) for table in (a, b))
    own = np.array(names_a)[:, None] == np.array(names_b)
    noise = 1.4826 * np.median(np.abs(likeness[~own])) if not own.all() else 1.0
    moved = {}
    for number, nearest in enumerate(likeness.argmax(1)):
        value = likeness[number, nearest]
        beside = value - likeness[number, own[number]].max(initial=-1.0) > _BEYOND_NOISE * noise
        if beside and value > TWINS and likeness[:, nearest].argmax() == number:
            moved[names_a[number]] = names_b[nearest]
    together = own.any() and likeness[own].mean() > _BEYOND_NOISE * noise / own.sum() ** 0.5
    return bool(together or len(moved) >= LEAST_SHARE * len(names_a)), moved
