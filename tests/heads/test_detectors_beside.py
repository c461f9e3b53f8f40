"""The strongest heads of two models by each detector."""

import numpy as np
import pytest

import tlspectral as tls
from tlspectral.heads import side_by_side


def test_heads_stand_in_the_order_of_their_scores():
    tables = [tls.detect_heads(tls.load_model(name), n_sequences=4) for name in ("tiny-rope", "tiny-rope-sym")]
    found = side_by_side(*(table.sample(frac=1, random_state=0) for table in tables), n=np.int64(3))
    assert found["rank"].tolist() == [1, 2, 3] * 3
    for side, table in zip("ab", tables, strict=True):
        for detector, rows in found.groupby("detector"):
            best = table.nlargest(3, detector)
            assert rows[side].tolist() == best["name"].tolist()
            assert rows[f"{side}_score"].tolist() == best[detector].tolist()
            assert rows[f"{side}_score_se"].tolist() == best[f"{detector}_se"].tolist()
    assert found.attrs["model_b"] == "tiny-rope-sym"


def test_a_table_without_detectors_is_refused():
    table = tls.k_composition(tls.load_model("tiny-rope"))
    with pytest.raises(ValueError, match="table a"):
        side_by_side(table, table)
