"""Formation times of constrained runs: the first evaluation that meets the criteria."""

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.fingerprint.constrained import formation
from tlspectral.studies.fingerprint.constrained.presets import loss_threshold


def evaluations(arm, seed, losses, induction, every=25):
    steps = every * np.arange(len(losses))
    return pd.DataFrame({"arm": arm, "seed": seed, "step": steps, "ce_pred": losses, "ind_best": induction})


def test_formation_is_the_first_evaluation_that_meets_the_criteria():
    threshold = loss_threshold(32)  # 1.808
    table = pd.concat(
        [
            evaluations("a", 0, [3.5, 2.0, 1.5, 1.9, 0.3], [0.1, 0.9, 0.2, 0.9, 0.9]),
            evaluations("a", 1, [3.5, 1.0, 0.5, 0.5, 0.5], [0.1, 0.6, 0.9, 0.9, 0.9]),
            evaluations("b", 0, [3.5, 3.0, 1.7, 1.7, 1.7], [0.1, 0.1, 0.1, 0.2, 0.5]),
            evaluations("b", 1, [3.5, 3.0, 2.0, 1.81, 1.809], [0.9] * 5),
        ]
    )
    found = formation(table.sample(frac=1, random_state=0).sort_values(["arm", "seed"]), vocabulary=32)
    assert found[["arm", "seed"]].values.tolist() == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    np.testing.assert_array_equal(found["formed_loss"], [50, 25, 50, np.nan])
    np.testing.assert_array_equal(found["formed_both"], [100, 25, np.nan, np.nan])
    np.testing.assert_array_equal(found["ind_at_formed_loss"], [0.2, 0.6, 0.1, np.nan])
    assert found["last_step"].tolist() == [100] * 4
    crossing = [25 + 25 * (2.0 - threshold) / 0.5, 25 * (3.5 - threshold) / 2.5, 25 + 25 * (3.0 - threshold) / 1.3]
    np.testing.assert_allclose(found["crossing_loss"], [*crossing, np.nan])


def test_a_run_below_the_threshold_from_the_start():
    found = formation(evaluations("a", 0, [0.1, 0.1], [0.9, 0.9]), vocabulary=32).iloc[0]
    assert (found["formed_loss"], found["formed_both"], found["crossing_loss"]) == (0, 0, 0)


def test_formation_of_other_tables_is_refused():
    table = evaluations("a", 0, [1.0], [0.9])
    with pytest.raises(ValueError, match="evaluations has no column ce_pred, ind_best"):
        formation(table.drop(columns=["ce_pred", "ind_best"]), vocabulary=32)
    with pytest.raises(ValueError, match="evaluations has no rows"):
        formation(table.iloc[:0], vocabulary=32)
    with pytest.raises(ValueError, match=r"arm a, seed 0 has several rows for one step \(step 0\): choose one run"):
        formation(pd.concat([table, table.assign(strength=1.0)], ignore_index=True), vocabulary=32)
