"""Attention sinks in long text: which keys, in which layers, and how much of later attention they get.

    python benchmarks/long_sinks.py measure MODEL ROWS    # the tables in docs/results/sinks/long
    python benchmarks/long_sinks.py page                  # the rows of docs/results/long_sinks.md

`measure` resumes from out/sinks. Schedule, fixed before its first run (29 November 2026). Rows are cut from the
packaged book, one behind the other, each with a start token: 4 rows of 8,192 tokens, for both models; for Gemma 3 270M
also one row of up to 32,768 tokens, as long as the CPU budget allows. A sink is a key that `tls.heads.attention_sinks`
finds: mean attention above max(.15, 4 / n), over heads and over all later queries at least 8 tokens behind it. Nothing
is chosen after the run: every sink of every layer and row is in the stored table. Of each sink:

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
token (MODEL-tokens.csv), all keys of one token together. In this row the 276 keys ` the` together get most
attention of layers 3 to 10. Rows 1 to 3, not seen yet, decide: the finding holds if in each of them, in each of these
layers, ` the` gets the most attention of all tokens, and more than five times uniform attention. In row 0, 79 of 276
keys ` the` have more than 4 times uniform attention in each of these layers: 41 of 42 behind ` in`, ` on`, ` into` and
` at`, and 38 of 234 behind other tokens. Rows 1 to 3 decide this too: it holds if the share behind these four tokens is
the larger one in each row, and a Fisher test over the three rows has p < .05. Before any number of Gemma was read: it
has one row of 4,096 tokens (three more when time was left), and SmolLM2 has rows 0 and 1 alone, because the processor
was shared by too many. In the evening of that day the processor was free for rows 2 and 3 of SmolLM2, of which nothing
had been read: they decide the questions of rows 1 to 3 together with row 1, which had been read. Gemma stays at 4,096
tokens.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import tlspectral as tls
from tlspectral.heads.detectors.sinks import LEAST, QUERIES, UNIFORM_TIMES, found_sinks
from tlspectral.models.hooking.placing import Hook
from tlspectral.models.hooking.strips import OfStrips, Strip
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import even_rows
from tlspectral.models.running.text import text_tokens, token_text
from tlspectral.plots.style import BLUE, GREY, INK, RED, dress, new_figure

FOLDER, WORK = Path("docs/results/sinks/long"), Path("out/sinks")
MODELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M"}
LENGTHS = {"smollm2-135m": 8192, "gemma3-270m": 4096}

CUTS = (64, 512, 2048)
"""Lengths to which the rows of long text are cut, to see whether sinks become more."""
BINS = (8, 64, 512, 2048)
"""Least distance of the queries of each bin; the last bin has no end."""
_OF_GEMMA = ((0, 0), (1, 1), (2, 4), (5, 5), (6, 10), (11, 11), (12, 16), (17, 17))  # 5, 11 and 17 have no window
GROUPS = {"smollm2-135m": ((0, 2), (3, 10), (11, 11), (12, 29)), "gemma3-270m": _OF_GEMMA}
TOKEN_GROUPS = {"smollm2-135m": (*((layer, layer) for layer in range(12)), (12, 29)), "gemma3-270m": _OF_GEMMA}
"""Layers that the page of long text takes together in its two tables."""
RED_TOKENS = {"smollm2-135m": " the", "gemma3-270m": "'"}
"""The token that the figure shows in red."""
NEAR, TOP, SHOWN = 32, 5, 0.01
BEFORE = {"smollm2-135m": (" the", range(3, 11), (" in", " on", " into", " at"))}
"""A token that gets attention in some places and not in others, in which layers, and the tokens before these places."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


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
def measure(model_name: str, rows: int) -> None:
    """Find the sinks of the first rows of the book, and write the tables of these rows."""
    torch.set_num_threads(1)
    view = attention_view(tls.load_model(model_name))
    tokens = text_tokens(view, None, n_sequences=rows, sequence_length=LENGTHS[model_name])
    WORK.mkdir(parents=True, exist_ok=True)
    for row in range(len(tokens)):
        file = WORK / f"{model_name}-{LENGTHS[model_name]}-{row}.pt"
        if not file.exists():
            begun = process_time()
            made = long_row(view, tokens[row : row + 1])
            torch.save({**made, "seconds": process_time() - begun}, file)
    made = [torch.load(WORK / f"{model_name}-{LENGTHS[model_name]}-{row}.pt") for row in range(len(tokens))]
    print(f"{model_name}, {len(made)} rows: {sum(one['seconds'] for one in made):.0f} CPU seconds", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for kind, table in tables_of(view, made, model_name).items():
        table.to_csv(FOLDER / f"{model_name}-{kind}.csv", index=False, float_format="%.4g")


def tables_of(view: AttentionView, made: list[dict[str, Any]], model_name: str) -> dict[str, pd.DataFrame]:
    """Return the tables to store by name. `made`: see `long_row`."""
    found, counts = tables_of_rows(view, made)
    tables = {"sinks": found, "counts": counts, "tokens": attention_by_token(view, made), "keys": keys_seen(view, made)}
    if model_name in BEFORE:
        tables["before"] = tokens_before(view, made, *BEFORE[model_name][:2])
    return tables


def attention_by_token(view: AttentionView, made: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the start token and the `TOP` tokens of most attention of each row and layer, all keys of a token as one.

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
            for found in dict.fromkeys([int(place[0]), *attention.topk(TOP).indices.tolist()]):
                rows.append({
                    "row": row, "layer": layer, "token": token_text(view, int(tokens[found])),
                    "keys": int((place == found).sum()), "above": int(above[found]),
                    "attention": float(attention[found]) / len(place), "uniform": float(uniform[found]) / len(place),
                    "attention_above": float(of_above[found]) / len(place),
                })  # fmt: skip
    return pd.DataFrame(rows)


def keys_seen(view: AttentionView, made: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the keys of each row and layer with a share above `SHOWN`, for the figure. `made`: see `long_row`."""
    return pd.DataFrame([
        {"row": row, "layer": layer, "key": key, "token": token_text(view, int(one["tokens"][key])),
         "share": float(one["share"][layer][key])}
        for row, one in enumerate(made)
        for layer in view.layers
        for key in (one["decided"][layer] & (one["share"][layer] > SHOWN)).nonzero()[:, 0].tolist()
    ])  # fmt: skip


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


def table_of(model_name: str, kind: str) -> pd.DataFrame:
    """Return a stored table of long text: `kind` is "sinks", "counts", "tokens", "keys" or "before"."""
    return pd.read_csv(FOLDER / f"{model_name}-{kind}.csv", keep_default_na=False)


def rows_of_page() -> Iterator[str]:
    """Yield the rows of the tables of docs/results/long_sinks.md."""
    for name, title in MODELS.items():
        counts, found = table_of(name, "counts"), table_of(name, "sinks")
        for first, last in GROUPS[name]:
            own = counts[counts["layer"].between(first, last)]
            starts = found[found["layer"].between(first, last) & found["sink"] & (found["key"] == 0)]
            others = [(own[f"sinks_{cut}"] - own[f"first_{cut}"]).mean() for cut in CUTS]
            others += [(own["sinks"].sum() - len(starts)) / len(own)]
            firsts = [*(own[f"first_{cut}"].mean() for cut in CUTS), len(starts) / len(own)]
            cells = [f"{_number(one, 2)}, {_number(other, 2)}" for one, other in zip(firsts, others, strict=True)]
            yield f"| {_layers(title, first, last)} | {' | '.join(cells)} | {_number(own['for_a_while'].mean(), 2)} |"
    for name, title in MODELS.items():
        tokens = table_of(name, "tokens")
        start = tokens["token"].iloc[0]
        n_rows = tokens["row"].nunique()
        for first, last in TOKEN_GROUPS[name]:
            own = tokens[tokens["layer"].between(first, last)]
            numbers = ["attention", "uniform", "keys", "above"]
            mean = own.groupby("token")[numbers].sum() / (n_rows * (last - first + 1))
            top = mean.drop(index=start)["attention"].idxmax()
            yield (
                f"| {_layers(title, first, last)} | {_number(mean.loc[start, 'attention'], 2)} | `{top!r}` | "
                f"{mean.loc[top, 'keys']:.0f} | {mean.loc[top, 'above']:.0f} | "
                f"{_number(mean.loc[top, 'attention'], 2)} | {_number(mean.loc[top, 'uniform'], 3)} |"
            )
    for name, (_, _, before) in BEFORE.items():
        for row, behind, others in above_by_row(table_of(name, "before"), before):
            yield f"| {row} | {behind[1]} of {behind[0]} | {others[1]} of {others[0]} |"


def above_by_row(table: pd.DataFrame, before: tuple[str, ...]) -> list[tuple[int, list[int], list[int]]]:
    """Return for each row its number, then [keys, keys above] behind the tokens `before` and behind other tokens."""
    return [
        (
            int(row),
            *(own.loc[own["before"].isin(before) == listed, ["keys", "above"]].sum().tolist() for listed in (1, 0)),
        )
        for row, own in table.groupby("row")
    ]


def _layers(title: str, first: int, last: int) -> str:
    return f"{title}, {first}" + ("" if first == last else f" to {last}")


@app.command()
def page() -> None:
    """Print the tables of docs/results/long_sinks.md."""
    for row in rows_of_page():
        typer.echo(row)


def figures() -> dict[str, Figure]:
    """Return the figure of the page by file name: keys by layer and position, and attention by layer."""
    figure = new_figure(7.2, 5.0)
    for number, (name, title) in enumerate(MODELS.items()):
        keys, tokens = table_of(name, "keys"), table_of(name, "tokens")
        start, axes = tokens["token"].iloc[0], figure.add_subplot(2, 2, 1 + number)
        keys = keys[keys["row"] == 0]
        named = RED_TOKENS[name]
        color = {start: GREY, named: RED}
        for label in (None, named, start):
            own = keys[~keys["token"].isin([*color])] if label is None else keys[keys["token"] == label]
            axes.scatter(
                own["key"], own["layer"], s=200 * own["share"], color=color[label] if label else BLUE, linewidths=0
            )
        axes.set_xlabel("position of the key")
        axes.set_ylabel("layer" if number == 0 else "")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        dress(axes)
        axes = figure.add_subplot(2, 2, 3 + number)
        mean = tokens.groupby(["token", "layer"])["attention"].sum() / tokens["row"].nunique()
        others = mean.drop(index=start).groupby("layer")
        for top, shade in ((False, BLUE), (True, RED)):
            own = [place for place in others.idxmax() if (place[0] == named) == top]
            axes.plot([layer for _, layer in own], mean[own].to_numpy(), "o", color=shade, markersize=4)
        axes.plot(mean[start].index, mean[start].to_numpy(), "o-", color=GREY, markersize=3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel("attention" if number == 0 else "")
        axes.set_ylim(0, 1)
        dress(axes)
    return {"long_sinks.png": figure}


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".removeprefix("0" if value < 1 else "")


if __name__ == "__main__":
    app()
