"""docs/results/retrieval.md gives what the stored tables of benchmarks/retrieval.py hold."""

from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("retrieval")


def test_the_page_has_the_rows_of_the_stored_tables(benchmark):
    page = (ROOT / "docs/results/retrieval.md").read_text(encoding="utf-8")
    rows = list(benchmark.rows_of_page())
    assert len(rows) == 2 + 6 + 3 + 6
    for row in rows:
        assert row in page
    prose = [line for line in page.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= 700


def test_the_sentences_of_the_page_are_those_of_the_stored_tables(benchmark):
    page = " ".join((ROOT / "docs/results/retrieval.md").read_text(encoding="utf-8").split())
    removed = pd.read_csv(benchmark.FOLDER / "gemma3-270m-removed.csv")
    fives = removed[(removed["score"] == "write") & (removed["draw"] >= 0)]
    effect = fives[[name for name in fives if name.startswith("prompt_")]].mean(axis=1)
    shared = fives["heads"].str.contains("L11H2")
    sentence = (
        f"The {shared.sum()} random fives of the writes' layers with L11H2 cost {-effect[shared].mean():.1f} logits"
    )
    assert (
        f"{sentence} on the mean, the {(~shared).sum()} without it {-effect[~shared].mean():.1f}".replace("0.", ".")
        in page
    )
    own = benchmark.effects_of("gemma3-270m")
    assert (own["excess"] < -3 * own["excess_se"]).all()
    assert (own["pvalue"] > 0.1).sum() == 2
    assert (benchmark.effects_of("smollm2-135m")["effect"] > -1).all()


def test_each_top_five_is_that_of_the_stored_scores_beside_39_other_fives_of_its_layers(benchmark):
    for name in benchmark.MODELS:
        scores = pd.read_csv(benchmark.FOLDER / f"{name}-scores.csv").set_index("name")
        removed = pd.read_csv(benchmark.FOLDER / f"{name}-removed.csv")
        for score in benchmark.SCORES:
            fives = removed.loc[removed["score"] == score, "heads"].str.split()
            assert set(fives.iloc[0]) == set(scores[score].nlargest(5).index)
            assert len({tuple(five) for five in fives}) == len(fives) == 40
            layers = [sorted(head.partition("H")[0] for head in five) for five in fives]
            assert all(one == layers[0] for one in layers)
