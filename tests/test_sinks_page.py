"""docs/results/sinks.md gives what the stored tables of benchmarks/sinks.py hold."""

from pathlib import Path

import pandas as pd
import pytest

from tlspectral.heads.detectors.sinks import LEAST

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("sinks")


@pytest.fixture
def page():
    return " ".join((ROOT / "docs/results/sinks.md").read_text(encoding="utf-8").split())


def test_the_page_has_the_rows_of_the_stored_tables(benchmark, page):
    rows = list(benchmark.rows_of_page())
    assert len(rows) == 5 * 4
    for row in rows:
        assert " ".join(row.split()) in page
    assert f"| {' | '.join(f'{least:g}'.removeprefix('0') for least in benchmark.THRESHOLDS)} |" in page


def test_the_sentences_of_the_page_are_those_of_the_stored_tables(benchmark, page):
    tables = {name: pd.read_csv(benchmark.FOLDER / f"{name}.csv") for name in benchmark.MODELS}
    own, other = (table[table["least"] == LEAST].set_index("layer") for table in tables.values())
    assert f"**SmolLM2, layers 3 to 9:** {own.loc[3:9, 'first'].mean():.2f} times".replace("0.", ".") in page
    low, high = own.loc[3:9, "others"].min(), own.loc[3:9, "others"].max()
    assert f"other keys ({low:.2f} to {high:.2f} by layer)".replace("0.8", ".8") in page
    assert (own.loc[[0, 1, 11], ["first", "others"]] == 0).all(axis=None)
    assert (own.loc[10, "first"], f"{own.loc[10, 'others']:.2f}", own.loc[2, "others"]) == (0, "0.72", 0.125)
    assert own.loc[12:29, "others"].max() == pytest.approx(1 / 64, abs=1e-4)
    assert ((other["first"] == 1) & (other["others"] == 0)).all()
    for name, table in tables.items():
        # A higher threshold never finds another sink.
        for column in ("first", "others", "sink_share"):
            wide = table.pivot(index="layer", columns="least", values=column)
            assert (wide.diff(axis=1).iloc[:, 1:] <= 0).all(axis=None), (name, column)
        # Where the first token is the only sink, both ways of leaving it out agree.
        alone = table[(table["first"] == 1) & (table["others"] == 0)]
        assert len(alone) > 2
        assert (alone["distance_sinkless"] - alone["distance_no_sinks"]).abs().max() < 1e-3
        assert (alone["entropy_sinkless"] - alone["entropy_no_sinks"]).abs().max() < 1e-3
