"""Attention sinks at several thresholds: how many there are, and what entropy and distance are without them; and sinks
in long text.

`python benchmarks/sinks.py measure MODEL` writes docs/results/sinks/MODEL.csv (two minutes of CPU for SmolLM2-135M or
Gemma 3 270M on one thread), a row per threshold and layer; `python benchmarks/sinks.py page` prints the table of
docs/results/sinks.md. Text is 64 x 64 tokens of the packaged book.

    python benchmarks/sinks.py long MODEL LENGTH ROWS    # docs/results/sinks/long/MODEL-LENGTH.csv
    python benchmarks/sinks.py long-page                 # the tables of docs/results/long_sinks.md

Schedule of the second part, fixed before its first run (29 November 2026). Rows are cut from the packaged book, one
behind the other, each with a start token: 4 rows of 8,192 tokens, for both models; for Gemma 3 270M also one row of up
to 32,768 tokens, as long as the CPU budget allows. A sink is a key that `tls.heads.attention_sinks` finds: mean
attention above max(.15, 4 / n), over heads and over all later queries at least 8 tokens behind it. Nothing is chosen
after the run: every sink of every layer and row is in the stored table. Of each sink:

* share: its mean attention, and share by distance of the query: 8 to 63, 64 to 511, 512 to 2,047, 2,048 or more tokens.
* uniform: the mean of 1 / (keys that the query sees) over the same queries: a random key of these queries.
* near: the mean share of the 32 nearest other keys of the row and layer that are no sinks.
* elsewhere: the mean share of the key at the same position of the other rows, in the same layer.
* same_token: how many judged keys of the row are the same token.

Growth: the same rows, cut to their first 64, 512 and 2,048 tokens (the model is causal, so the attention of these
tokens is the same): sinks per row at each length, in all layers together, first token apart. Number of sinks per row is
said to grow if it is larger at 8,192 than at 512 tokens in every row. Layers, tokens and counts are described, not
tested: four rows of one book carry no error.

A key can also be a sink for a while. `for_a_while` counts keys that are no sinks, whose share of the queries 8 to 511
tokens behind them exceeds .15 and 4 times uniform attention of these queries.

Amended on 29 November 2026, before any number was read: Gemma 3 270M has two rows of 8,192 tokens first, two more and
the longer row only if the CPU budget allows. Amended after the first row of SmolLM2 was seen, in which no key but the
first token is a sink: keys that are sinks for a while are listed with the same numbers, and `lately` is their share of
the queries 8 to 511 tokens behind them. The judgement of growth stays as it was. Also after this row: attention by
token (MODEL-LENGTH-tokens.csv), all keys of one token together. In this row the 276 keys ` the` together get most
attention of layers 3 to 10. Rows 1 to 3, not seen yet, decide: the finding holds if in each of them, in each of these
layers, ` the` gets the most attention of all tokens, and more than five times uniform attention. In row 0, 79 of 276
keys ` the` have more than 4 times uniform attention in each of these layers: 41 of 42 behind ` in`, ` on`, ` into` and
` at`, and 38 of 234 behind other tokens. Rows 1 to 3 decide this too: it holds if the share behind these four tokens is
the larger one in each row, and a Fisher test over the three rows has p < .05.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import pandas as pd
import torch
import typer

import tlspectral as tls
from tlspectral.heads.detectors.heads import sequences_at_once
from tlspectral.heads.detectors.sinks import LEAST, QUERIES, UNIFORM_TIMES, found_sinks
from tlspectral.heads.detectors.spread import Spread
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.passes import run_until
from tlspectral.models.running.text import text_tokens, token_text

FOLDER = Path("docs/results/sinks")
WORK = Path("out/sinks")
"""Folder of the rows that `long` has finished, from which it resumes."""
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
SEQUENCES, LENGTH = 64, 64
THRESHOLDS = (0.05, 0.1, LEAST, 0.2, 0.25, 0.3, 0.4)
GROUPS = {"smollm2-135m": ((0, 2), (3, 9), (10, 10), (12, 29)), "gemma3-270m": ((0, 17),)}
"""Layers that the page takes together, first and last."""

CUTS = (64, 512, 2048)
"""Lengths to which the rows of long text are cut, to see whether sinks become more."""
BINS = (8, 64, 512, 2048)
"""Least distance of the queries of each bin; the last bin has no end."""
NEAR, TOP = 32, 5
BEFORE = {"smollm2-135m": (" the", range(3, 11), (" in", " on", " into", " at"))}
"""A token that gets attention in some places and not in others, in which layers, and the tokens before these places."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def measure(model_name: str) -> None:
    """Measure the heads of a model without the sinks of each threshold, and write a row per threshold and layer."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    prompts = even_rows(text_tokens(view, None, n_sequences=SEQUENCES, sequence_length=LENGTH))
    at_once = sequences_at_once(view, LENGTH)
    sinks = found_sinks(view, prompts, view.layers, at_once)
    spreads = {least: Spread(view, prompts, None, replace(sinks, least=least)) for least in THRESHOLDS}

    def read(layer: int, rows: slice, pattern: torch.Tensor, strip: Strip, hook: Any) -> None:
        for spread in spreads.values():
            spread.read(layer, pattern, strip, rows)

    for start in range(0, SEQUENCES, at_once):
        rows = slice(start, min(start + at_once, SEQUENCES))
        hooks = [(view.hook_names(layer)["pattern"], OfStrips(partial(read, layer, rows))) for layer in view.layers]
        run_until(view, prompts.tokens[rows], hooks, last=hooks[-1][0])
        for spread in spreads.values():
            spread.end_batch(rows)
    layers = [layer for layer in view.layers for _ in range(view.n_heads(layer))]
    table = []
    for least, spread in spreads.items():
        heads = pd.DataFrame({"layer": layers, **spread.measured()})
        for layer, own in heads.groupby("layer"):
            found = replace(sinks, least=least).found[int(layer)]  # type: ignore[arg-type]
            counts = {"first": float(found[:, 0].sum()) / SEQUENCES, "others": float(found[:, 1:].sum()) / SEQUENCES}
            columns = ["distance", "distance_sinkless", "distance_no_sinks", "entropy", "entropy_sinkless"]
            medians = own[[*columns, "entropy_no_sinks", "sink_share"]].median()
            table.append({"least": least, "layer": layer, **counts, **medians})
    FOLDER.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(table).round(4).to_csv(FOLDER / f"{model_name}.csv", index=False)


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the page's table: means over layers that are taken together, a column per threshold."""
    for name, title in MODELS.items():
        table = pd.read_csv(FOLDER / f"{name}.csv")
        for first, last in GROUPS[name]:
            mean = table[table["layer"].between(first, last)].groupby("least").mean()
            layers = f"{title}, {first}" + ("" if first == last else f" to {last}")
            for column, said, digits in (("first", "first token", 2), ("others", "other sinks", 2)):
                yield _row(layers, said, ["", ""], mean[column], digits)
            for column, digits in (("distance", 1), ("entropy", 2)):
                without = [_number(mean[each].iloc[0], digits) for each in (column, f"{column}_sinkless")]
                yield _row(layers, column, without, mean[f"{column}_no_sinks"], digits)


def _row(layers: str, said: str, without: list[str], values: pd.Series, digits: int) -> str:
    return f"| {' | '.join([layers, said, *without, *(_number(value, digits) for value in values)])} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".removeprefix("0" if value < 1 else "")


@dataclass
class ByDistance:
    """Attention that each key of one row gets, by distance of the query, added up in hooks while the row runs.

    sums, counts, uniform: from layer to [bins, keys]: attention, mean over heads; queries; and 1 / (keys that a query
    sees), each summed over the queries of a bin.
    """

    view: AttentionView
    width: int
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, torch.Tensor] = field(default_factory=dict)
    uniform: dict[int, torch.Tensor] = field(default_factory=dict)

    def hooks(self) -> list[Hook]:
        """Return a hook for the pattern of each layer."""
        return [
            (self.view.hook_names(layer)["pattern"], OfStrips(partial(self._add, layer))) for layer in self.view.layers
        ]

    def _add(self, layer: int, pattern: torch.Tensor, strip: Strip, hook: Any) -> None:
        if strip.is_first:
            for each in (self.sums, self.counts, self.uniform):
                each[layer] = torch.zeros(len(BINS), self.width, dtype=torch.float64)
        keys = slice(strip.n_keys)
        seen = self.view.reader.seen_keys(self.view.model, layer, strip.n_keys, strip.start)
        behind = torch.arange(strip.start, strip.stop)[:, None] - torch.arange(strip.n_keys)
        attention, evenly = pattern[0].mean(0), (1.0 / seen.sum(1))[:, None]
        for number, (least, end) in enumerate(zip(BINS, [*BINS[1:], self.width], strict=True)):
            own = seen & (behind >= least) & (behind < end)
            self.counts[layer][number, keys] += own.sum(0)
            self.sums[layer][number, keys] += (attention * own).sum(0)
            self.uniform[layer][number, keys] += (evenly * own).sum(0)


def long_row(view: AttentionView, tokens: torch.Tensor) -> dict[str, Any]:
    """Return sinks and shares of one row of token ids [1, pos], each from layer to an array over keys.

    `share, decided, found` are those of `attention_sinks`; `sums, counts, uniform` as in `ByDistance`. `cuts` has the
    sinks of the row's first tokens, by length.
    """
    by_distance = ByDistance(view, tokens.shape[1])
    with view.hooks_on(by_distance.hooks()):
        sinks = found_sinks(view, even_rows(tokens), view.layers, 1)
    cuts = {}
    for cut in (cut for cut in CUTS if cut < tokens.shape[1]):
        of_cut = found_sinks(view, even_rows(tokens[:, :cut]), view.layers, 1)
        cuts[cut] = {layer: keys[0].nonzero()[:, 0].tolist() for layer, keys in of_cut.found.items()}
    return {
        "tokens": tokens[0],
        "share": {layer: share[0] for layer, share in sinks.share.items()},
        "decided": {layer: keys[0] for layer, keys in sinks.decided.items()},
        "found": {layer: keys[0] for layer, keys in sinks.found.items()},
        **{name: getattr(by_distance, name) for name in ("sums", "counts", "uniform")},
        "cuts": cuts,
    }


@app.command()
def long(model_name: str, length: int, rows: int) -> None:
    """Find the sinks of long rows, and write a row per sink, and a row per row of text and layer."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    tokens = text_tokens(view, None, n_sequences=rows, sequence_length=length)
    WORK.mkdir(parents=True, exist_ok=True)
    for row in range(len(tokens)):
        file = WORK / f"{model_name}-{length}-{row}.pt"
        if not file.exists():
            begun = process_time()
            made = long_row(view, tokens[row : row + 1])
            torch.save({**made, "seconds": process_time() - begun}, file)
    made = [torch.load(WORK / f"{model_name}-{length}-{row}.pt") for row in range(len(tokens))]
    print(f"{sum(one['seconds'] for one in made):.0f} CPU seconds")
    found, counts = tables_of_rows(view, made)
    gathered = attention_by_token(view, made)
    (FOLDER / "long").mkdir(parents=True, exist_ok=True)
    found.to_csv(FOLDER / "long" / f"{model_name}-{length}.csv", index=False, float_format="%.4g")
    counts.to_csv(FOLDER / "long" / f"{model_name}-{length}-counts.csv", index=False, float_format="%.4g")
    if model_name in BEFORE:
        before = tokens_before(view, made, *BEFORE[model_name][:2])
        before.to_csv(FOLDER / "long" / f"{model_name}-{length}-before.csv", index=False)
    gathered.to_csv(FOLDER / "long" / f"{model_name}-{length}-tokens.csv", index=False, float_format="%.4g")


def attention_by_token(view: AttentionView, made: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the `TOP` tokens of most attention of each row and layer, and the start token; all keys of a token as one.

    `attention` is the mean over heads and queries of the attention to these keys, as far as they stand 8 or more tokens
    behind the query; `uniform` the same of a query that looks at all its keys alike. `above` counts keys with more than
    4 times uniform attention, and `attention_above` is what these get. `made`: see `long_row`.
    """
    rows = []
    for row, one in enumerate(made):
        tokens, place = one["tokens"].unique(return_inverse=True)
        for layer in view.layers:
            sums, evenly = (one[name][layer].sum(0) for name in ("sums", "uniform"))
            more = (sums > UNIFORM_TIMES * evenly).double()
            attention, uniform, above, of_above = (
                torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, place, each)
                for each in (sums, evenly, more, sums * more)
            )
            for found in dict.fromkeys([*attention.topk(TOP).indices.tolist(), int(place[0])]):
                rows.append({
                    "row": row, "layer": layer, "token": token_text(view, int(tokens[found])),
                    "keys": int((place == found).sum()), "above": int(above[found]),
                    "attention": float(attention[found]) / len(place), "uniform": float(uniform[found]) / len(place),
                    "attention_above": float(of_above[found]) / len(place),
                })  # fmt: skip
    return pd.DataFrame(rows)


def tokens_before(view: AttentionView, made: list[dict[str, Any]], token: str, layers: Iterable[int]) -> pd.DataFrame:
    """Return by row and token that stands before `token`: places (`keys`), and those with more than 4 times uniform
    attention in each of the layers (`above`). `made`: see `long_row`.
    """
    rows = []
    for row, one in enumerate(made):
        above = torch.stack([one["sums"][at].sum(0) > UNIFORM_TIMES * one["uniform"][at].sum(0) for at in layers]).all(
            0
        )
        texts = [token_text(view, number) for number in one["tokens"].tolist()]
        for before, this, is_above in zip(texts, texts[1:], above[1:].tolist(), strict=False):
            if this == token:
                rows.append({"row": row, "before": before, "keys": 1, "above": int(is_above)})
    return pd.DataFrame(rows).groupby(["row", "before"], as_index=False).sum()


def tables_of_rows(view: AttentionView, made: list[dict[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table with a row per sink, and one with a row per row of text and layer. `made`: see `long_row`."""
    found, counts = [], []
    for row, one in enumerate(made):
        tokens = one["tokens"].tolist()
        for layer in view.layers:
            share, decided, sinks = (one[name][layer] for name in ("share", "decided", "found"))
            by_bin = one["sums"][layer] / one["counts"][layer]
            uniform = one["uniform"][layer].sum(0) / one["counts"][layer].sum(0)
            a_while = slice(BINS.index(8), BINS.index(512))
            n = one["counts"][layer][a_while].sum(0)
            lately = one["sums"][layer][a_while].sum(0) / n
            bound = (UNIFORM_TIMES * one["uniform"][layer][a_while].sum(0) / n).clamp_min(LEAST)
            for_a_while = decided & ~sinks & (n >= QUERIES) & (lately > bound)
            counts.append({
                "row": row, "layer": layer, "judged": int(decided.sum()), "sinks": int(sinks.sum()),
                "for_a_while": int(for_a_while.sum()),
                **{f"sinks_{cut}": len(of_cut[layer]) for cut, of_cut in one["cuts"].items()},
                **{f"first_{cut}": int(0 in of_cut[layer]) for cut, of_cut in one["cuts"].items()},
            })  # fmt: skip
            occurring = Counter(token for token, judged in zip(tokens, decided.tolist(), strict=True) if judged)
            others = (decided & ~sinks & ~for_a_while).nonzero()[:, 0]
            for key in (sinks | for_a_while).nonzero()[:, 0].tolist():
                near = others[(others - key).abs().argsort(stable=True)[:NEAR]]
                elsewhere = [float(other["share"][layer][key]) for other in made if other is not one]
                found.append({
                    "row": row, "layer": layer, "key": key, "token": token_text(view, tokens[key]),
                    "sink": bool(sinks[key]), "same_token": occurring[tokens[key]], "share": float(share[key]),
                    "lately": float(lately[key]),
                    **{f"share_{least}": float(by_bin[number, key]) for number, least in enumerate(BINS)},
                    "uniform": float(uniform[key]), "near": float(share[near].mean()),
                    "elsewhere": sum(elsewhere) / len(elsewhere) if elsewhere else float("nan"),
                })  # fmt: skip
    return pd.DataFrame(found), pd.DataFrame(counts)


@app.command()
def page() -> None:
    """Print the table of docs/results/sinks.md."""
    for row in rows_of_page():
        typer.echo(row)


if __name__ == "__main__":
    app()
