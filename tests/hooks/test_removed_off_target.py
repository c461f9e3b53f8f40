"""`off_target=`, which is removed: what its error shows gives the numbers that it gave."""

import dataclasses

import numpy as np
import pytest
import zoo
from pair_prompts import prompt_pairs

import tlspectral as tls
from tlspectral.hooks.parts import Output

EDGES = [("L0H1", "L1H2.q"), ("L1H2", "logits"), ("embedding", "L0KV0.v"), ("L0MLP", "logits")]


def pairs(name="pairs", n=3, length=9, seed=4, answer=7):
    clean, other = prompt_pairs(n, length, seed=seed, at=3)
    return dataclasses.replace(tls.logit_difference(clean, answer, 10, counterfactual=other), name=name)


def shown(call):
    """The lines of code that the error shows, run with what they name; returns their names."""
    model = zoo.shared("bridge", "llama")
    with pytest.raises(TypeError, match="has no off_target=: call it once for each task") as refused:
        call(model)
    names = {"tls": tls, "model": model, "edges": EDGES, "pairs": pairs(), "_2_others": pairs("2 others", 4, 11, 7)}
    lines = str(refused.value).splitlines()[1:]
    assert len(lines) == 2
    exec("\n".join(lines), names)
    return names


@pytest.mark.slow
def test_the_lines_for_a_sweep_are_the_sweeps_side_by_side():
    names = shown(
        lambda model: tls.ablation_sweep(
            model, "symmetric", heads=["L0H1"], task=pairs(), seed=3, off_target=[pairs("2 others"), "induction"]
        )
    )
    table, model = names["table"], names["model"]
    for name, task in (("", pairs()), ("_2_others_", names["_2_others"]), ("induction_", "induction")):
        alone = tls.ablation_sweep(model, "symmetric", heads=["L0H1"], task=task, seed=3, control="random", draws=19)
        for column in ("delta", "delta_se", "control_p", "control_p_floor", "excess_z"):
            assert table[f"{name}{column}"].tolist() == alone[column].tolist()


def test_draws_and_parts_that_were_given_are_shown():
    model = zoo.shared("bridge", "llama")
    for off_target in ("language", ["language"], ("language",)):
        with pytest.raises(TypeError) as refused:
            tls.ablation_sweep(
                model, Output("mean"), heads={"a": ["L0H1"]}, draws=25, control="random", off_target=off_target
            )
        assert str(refused.value).splitlines()[1:] == [
            "sweeps = [tls.ablation_sweep(model, Output(replace='mean', reference=None, seed=0), "
            "heads={'a': ['L0H1']}, control='random', draws=25, task=task) for task in ('induction', 'language')]",
            "table = tls.tables.join(sweeps[0], language=sweeps[1])",
        ]
    with pytest.raises(TypeError, match=r"for task in \('induction', other\)"):
        tls.ablation_sweep(model, "output", off_target=())
    with pytest.raises(TypeError, match="unexpected keyword argument 'off_targets'"):
        tls.ablation_sweep(model, "output", off_targets=[])


def test_the_lines_for_a_circuit_are_the_circuit_and_the_model_on_each_task():
    names = shown(lambda model: tls.run_circuit(model, EDGES, pairs(), off_target=[pairs("2 others", 4, 11, 7)]))
    model = names["model"]
    for task, value, intact in zip([pairs(), names["_2_others"]], names["values"], names["intact"], strict=True):
        assert type(value) is tls.tasks.MetricValue
        assert (value.per_sequence == tls.run_circuit(model, EDGES, task).per_sequence).all()
        change, by_pair = value - intact, value.per_sequence - intact.per_sequence
        assert change.se == pytest.approx(by_pair.std(ddof=1) / len(by_pair) ** 0.5)
        none, swapped = tls.run_circuit(model, [], task), tls.evaluate(model, task.denoising())
        # Two routes in float32: 1e-6 measured; the ends are .05 and more apart.
        np.testing.assert_allclose(swapped.per_sequence, none.per_sequence, atol=1e-5)
        assert abs(float(intact) - float(swapped)) > 1e-2
    with pytest.raises(ValueError, match="over the same"):
        names["values"][0] - names["values"][1]
