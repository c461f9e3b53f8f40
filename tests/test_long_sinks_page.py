"""docs/results/long_sinks.md gives what the stored tables of benchmarks/long_sinks.py hold, and what these count."""

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from scipy.stats import fisher_exact
from zoo import shared

from tlspectral.models.reading import attention_view
from tlspectral.models.running.long_prompts import strips_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("long_sinks")


@pytest.fixture
def page():
    return " ".join((ROOT / "docs/results/long_sinks.md").read_text(encoding="utf-8").split())


def test_attention_by_distance_is_that_of_the_patterns(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "BINS", (8, 12, 20, 40))
    monkeypatch.setattr(benchmark, "CUTS", (32,))
    view, tokens = attention_view(shared("bridge", "llama")), zoo.prompt(1, 60)
    with strips_of(16, 50):
        made = benchmark.long_row(view, tokens)
    names = [view.hook_names(layer)["pattern"] for layer in view.layers]
    with torch.no_grad():
        patterns = view.model.run_with_cache(tokens, names_filter=names)[1]
    behind = torch.arange(60)[:, None] - torch.arange(60)
    for layer, name in enumerate(names):
        mean, total = patterns[name][0].mean(0).double(), 0.0
        for number, (least, end) in enumerate(((8, 12), (12, 20), (20, 40), (40, 60))):
            queries = (behind >= least) & (behind < end)
            # Sums of some ten float32 probabilities, measured 3e-7; a bin that begins one token later differs by .02.
            assert made["sums"][layer][number].numpy() == pytest.approx((mean * queries).sum(0).numpy(), abs=3e-6)
            assert (made["counts"][layer][number] == queries.sum(0)).all()
            total = total + (mean * queries).sum(0)
        judged = (behind >= 8).sum(0).clamp_min(1)
        assert made["share"][layer].numpy() == pytest.approx((total / judged).numpy(), abs=3e-6)
        evenly = ((behind >= 8) / torch.arange(1, 61)[:, None]).sum(0)
        assert made["uniform"][layer].sum(0).numpy() == pytest.approx(evenly.numpy(), abs=1e-6)


def test_attention_of_tokens_adds_up_to_that_of_their_keys(benchmark):
    view, tokens = attention_view(shared("bridge", "llama")), zoo.prompt(1, 60)
    tokens[0, 30:] = tokens[0, :30].clone().flip(0)  # every token occurs again
    made = benchmark.long_row(view, tokens)
    table = benchmark.attention_by_token(view, [made])
    for row in table.itertuples():
        keys = made["tokens"] == int(row.token)
        assert row.keys == int(keys.sum())
        assert row.attention == pytest.approx(float(made["sums"][row.layer].sum(0)[keys].sum()) / 60)
    assert (table.groupby("layer")["token"].first() == str(int(tokens[0, 0]))).all()


def test_the_page_has_the_rows_of_the_stored_tables(benchmark, page):
    for row in benchmark.rows_of_page():
        assert " ".join(row.split()) in page


def test_the_sentences_of_the_page_are_those_of_the_stored_tables(benchmark, page):
    found, tokens = (benchmark.table_of("smollm2-135m", kind) for kind in ("sinks", "tokens"))
    # No key but the first is a sink, and the first one only from layer 12 on.
    assert (found.loc[found["sink"], "key"] == 0).all()
    assert (found.loc[found["sink"], "layer"] >= 12).all()
    most = tokens[tokens["layer"].between(3, 10)].set_index(["row", "layer"])
    top = most.loc[most.groupby(level=[0, 1])["attention"].transform("max") == most["attention"]]
    assert (top["token"] == " the").all()
    assert (top["attention"] > 5 * top["uniform"]).all()
    assert f"{top['attention'].min():.2f} to {top['attention'].max():.2f}".replace("0.", ".") in page
    # Row 0 chose the four tokens; rows 1 to 3 decide, each by itself and all together.
    before, behind_these = benchmark.table_of("smollm2-135m", "before"), benchmark.BEFORE["smollm2-135m"][2]
    _, *by_row = benchmark.above_by_row(before, behind_these)
    assert [row for row, _, _ in by_row] == [1, 2, 3]
    assert all(behind[1] / behind[0] > others[1] / others[0] for _, behind, others in by_row)
    behind, others = (np.sum([row[place] for row in by_row], axis=0) for place in (1, 2))
    assert fisher_exact([[above, keys - above] for keys, above in (behind, others)]).pvalue < 1e-80
    assert f"{behind[1]} of {behind[0]} and {others[1]} of {others[0]}" in page
    assert (top["attention"] > 9 * top["uniform"]).all()
    assert (top["attention_above"] >= 0.95 * top["attention"] - 1e-4).all()
    assert f"{top['above'].min()} to {top['above'].max()} of {top['keys'].min()} to {top['keys'].max()} keys" in page


def test_sinks_become_fewer_and_fade(benchmark, page):
    found, counts = (benchmark.table_of("smollm2-135m", kind) for kind in ("sinks", "counts"))
    others = (counts["sinks_512"] - counts["first_512"]).groupby(counts["row"]).sum()
    assert f"{', '.join(map(str, others[:3]))} and {others[3]} sinks other than the first token" in page
    one = found[(found["row"] == 0) & (found["layer"] == 4) & (found["key"] == 7)].iloc[0]
    shares = [f"{one[f'share_{least}']:.2f}".removeprefix("0") for least in benchmark.BINS]
    assert f"gets {shares[0]} of the attention" in page
    assert f"{shares[1]} from 64 to 511, {shares[2]} from 512 to 2,047, and {shares[3]} beyond" in page
    first = found[found["sink"]]["share"]
    assert f"{first.min():.2f} to {first.max():.2f} in 8,192".replace("0.", ".") in page
    a_while = found[~found["sink"]]
    assert {*zip(a_while["row"], a_while["key"], strict=True)} == {
        (0, 7),
        (0, 27),
        (1, 0),
        (1, 76),
        (2, 27),
        (3, 19),
        (3, 245),
    }
    assert f"{found['uniform'].min():.4f} to {found['uniform'].max():.4f}".replace("0.", ".") in page
    assert found["near"].max() < 0.003
    assert found.loc[found["key"] > 0, "elsewhere"].max() < 0.02


def test_sinks_of_gemma_are_apostrophes_and_full_stops_under_windows(benchmark, page):
    found, counts = (benchmark.table_of("gemma3-270m", kind) for kind in ("sinks", "counts"))
    assert found["sink"].all()
    others = found[found["key"] > 0]
    places = others.drop_duplicates(["row", "key"]).groupby("token").size()
    assert {**places} == {"'": 42, ".": 9}
    assert "42 and 9 places in four rows" in page
    assert {*others["layer"]} <= {*range(6, 17)} - {11}
    early = (counts["sinks_512"] - counts["first_512"]).groupby(counts["row"]).sum()
    whole = others.groupby("row").size()
    assert (whole > early).all()
    assert "8, 3, 1 and 0 in the first 512 tokens, 52, 63, 45 and 62 in 4,096" in page
    assert (early.tolist(), whole.tolist()) == ([8, 3, 1, 0], [52, 63, 45, 62])
    uniform = [f"{others['uniform'].agg(which):.4f}".removeprefix("0") for which in ("min", "max")]
    shares = [f"{others['share'].agg(which):.2f}".removeprefix("0") for which in ("min", "max")]
    assert f"{' to '.join(uniform)} where their shares are {' to '.join(shares)}" in page
    assert (others["near"].max() < 0.003, others["elsewhere"].astype(float).max() < 0.04) == (True, True)
