"""B.5 of PS with words that swap, where a model answers; and how scores depend on tau and on the list of swaps.

    python benchmarks/swapped_words.py answers smollm2-135m      # who answers; also gemma3-270m
    python benchmarks/swapped_words.py again gemma3-270m plain 16   # once more, on the lists of part 3
    python benchmarks/swapped_words.py train 1                   # a small model that answers; seeds 1 and 2
    python benchmarks/swapped_words.py measure tiny-rope         # B.5; also trained-1 and trained-2
    python benchmarks/swapped_words.py sensitivity smollm2-135m  # tau and swaps; also gemma3-270m
    python benchmarks/swapped_words.py page                      # tables, from what the others wrote

PS is "Decoupling Positional and Symbolic Attention Behavior". Every command is resumable: it keeps what the models
did in `out/swapped_words`, and its tables in `docs/results/positional`.

Schedule, fixed before the first run. Nothing of these settings was measured before, except that both models answer .22
to .29 of the prompts with 16 pairs in the plain template (docs/results/positional.md).

1. Answers. SmolLM2-135M-Instruct and the base model Gemma 3 270M; 4, 9 and 16 pairs; four lists from seed 1 with all
   questions of nine places (or of four): 36 prompts, or 16. Four kinds of prompts (`KINDS`):
   "plain" and "chat" are PS's, "chat" with the markup that the model was trained on (ChatML for SmolLM2) or that its
   family uses (Gemma). "worked" is "plain" behind two contexts of four other names whose question is answered.
   "line" has the lines alone, and asks by the beginning of a line. A prompt is answered if the right colour's first
   token is the most probable of all tokens. A model answers a kind of prompts if it answers more than .5 of them (the
   bound of docs/results/positional.md) here, and again on the lists of part 3.
2. Nine places need nine pairs. If a packaged model answers with 9 or 16 pairs, part 3 runs there: in the order plain,
   chat, worked, line, and with the most pairs. Answers with four pairs alone are reported, without scores. If neither
   answers, three small models are trained (`train`, seeds 0, 1, 2; two layers of four heads, attention only, rotary
   positions) on the same task in tokens, 64 pairs, the number of PS's Figure 3C. At most ten CPU minutes for the three.
   A seed that answers .5 of its prompts or fewer is reported and left out.
3. B.5 to the letter. Words of two blocks swap and the model runs again; all 36 pairs of the nine evenly spaced places,
   the first block among them; a question about each of the nine; ten lists from seed 2 (as many as ten CPU minutes
   allow, at least four). Scores of heads and of rotary pairs, on the model's own scores. PS gives no tau. Tau is .1 of
   the head's own largest difference between two blocks, and .01, .03 and .3 beside it. Read at each of the four:
   a. Figure 1B: r of the two scores over heads, beside heads that toss a coin. Decides nothing.
   b. Figure 7: rank correlation, over the nine places, of the median over heads. As in PS: `s_pos` at .8 or more and
      `s_sym` at -.8 or less (the more distant the block, the more symbolic).
   c. Figure 1C: median over heads by rotary pair. As in PS: in the slower half of the pairs `s_sym` is higher, and in
      the faster half `s_pos`, both in every list.
   d. Footnote 2, for a model with four layers or more: medians of earlier and later layers, as in positional_256.py.
   e. Words against keys: the same lists with keys that swap. Rank correlation over heads of each score: at .8 or more
      keys may stand for words.
   An answer that is not the same at all four tau is called dependent on tau. With three trained models an answer counts
   if all three give it.
4. Sensitivity, on the stored set-up of docs/results/positional.md: plain, 16 pairs, keys swap, ten lists from seed 0,
   nine questions. Tau of .01, .03, .1, .3 of the head's own largest difference, by all 36 swaps and by the 28 without
   the first block. A head is called positional if `s_pos` exceeds `s_sym` by more than .1, symbolic if it is lower by
   more than .1. Reported: medians of `s_pos`, `s_sym`, `alpha_ess`; the number of heads that are called either; rank
   correlation of `s_pos - s_sym` over heads with the default setting; heads called alike under all eight settings.

Amendment of 2026-11-29, after part 1 and before part 3 ran for any model. Neither packaged language model answers: one
of the 16 cells with nine pairs or more was above .5 (Gemma, plain, 16 pairs: .56 of 36), and had .37 of the 90 prompts
of part 3. Small models trained on the lists themselves did not learn them in the time: after 1,100 to 2,200 steps the
loss was that of guessing a colour of the list (seed 0, stopped, and a seed for development). So the small models are
those of the random-map task, which the package has as `tiny-rope` (seed 0) and which `train` makes with seeds 1 and 2,
in the same way; their vocabulary of 32 tokens allows 16 names and 16 colours, so a list has 16 pairs, NAME COLOUR, and
the question is a name. They have eight heads in two layers: read part 3 by head and by layer.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig
from tlspectral_studies.common.random_map import RandomMapTask
from tlspectral_studies.common.trainer import TrainingSettings
from tlspectral_studies.common.trainer import train as trained_on_maps
from tlspectral_studies.positional_symbolic.medians import median_tests

import tlspectral as tls
from tlspectral.errors.settings import checked_settings
from tlspectral.models.running.text import packaged_words
from tlspectral.positional import BindingTask, BlockDraw, BlockTask, Question
from tlspectral.positional.block_task import swapped_blocks
from tlspectral.positional.block_weights import joined_columns
from tlspectral.positional.scores import swap_scores
from tlspectral.tables import read_table
from tlspectral.tables.measurement import unbundled
from tlspectral.tasks.block_prompt import chosen_swaps

FOLDER = Path("docs/results/positional")
RUNS = Path("out/swapped_words")
PAIRS = (4, 9, 16)
TAU = (0.01, 0.03, 0.1, 0.3)
CHAT = {"smollm2-135m": "qwen2", "gemma3-270m": "gemma-2"}
CALLED = 0.1
VOCABULARY = 32
CONFIG = TransformerConfig(positional_embedding_type="rotary")
HEADS = ["layer", "head"]
FIGURE_1C = (("s_pos", "fast", "slow"), ("s_sym", "slow", "fast"))
"""Of each score the half of the rotary pairs in which it is higher, and the other half."""

app = typer.Typer(add_completion=False)


@checked_settings
@dataclass(frozen=True)
class Worked(BindingTask):
    """The binding task behind two shorter ones, with other names, whose questions are answered."""

    def draw(self, seed: int) -> BlockDraw:
        """Return the draw of the binding task, with a longer prefix."""
        draw = super().draw(seed)
        generator = np.random.default_rng([seed, 1])
        used = {str(block).split()[0] for block in draw.blocks}
        names = [str(name) for name in generator.permutation(packaged_words("names")) if name not in used]
        colours = list(map(str, generator.choice(packaged_words("colours"), 8)))
        examples = ""
        for first in (0, 4):
            lines = BindingTask(self.template, 4).lines(
                tuple(names[first : first + 4]), tuple(colours[first : first + 4])
            )
            asked = lines.questions[int(generator.integers(4))]
            examples += f"{lines.prefix}{''.join(map(str, lines.blocks))}{asked.suffix}{asked.answer}\n\n"
        return BlockDraw(f"{examples}{draw.prefix}", draw.blocks, draw.questions, draw.choices)


@checked_settings
@dataclass(frozen=True)
class Line(BindingTask):
    """The lines of the binding task alone; the question is the beginning of a line."""

    def lines(self, names: tuple[str, ...], colours: tuple[str, ...]) -> BlockDraw:
        """Return the draw with these names and colours."""
        questions = tuple(
            Question(block, f"{name} likes the color", f" {colour}")
            for block, (name, colour) in enumerate(zip(names, colours, strict=True))
        )
        return BlockDraw("", super().lines(names, colours).blocks, questions)


@checked_settings
@dataclass(frozen=True)
class Tokens(BlockTask):
    """The binding task in tokens of the random-map task: blocks NAME COLOUR, and a name as question."""

    n_blocks: int = 16

    def draw(self, seed: int) -> BlockDraw:
        """Return a draw of different names, and of colours with repetition; no token is both."""
        generator = np.random.default_rng(seed)
        tokens = generator.permutation(VOCABULARY)
        names, others = tokens[: self.n_blocks], tokens[VOCABULARY // 2 :]
        colours = generator.choice(others, self.n_blocks)
        blocks = tuple(torch.tensor([int(name), int(colour)]) for name, colour in zip(names, colours, strict=True))
        questions = tuple(
            Question(block, torch.tensor([int(name)]), int(colour))
            for block, (name, colour) in enumerate(zip(names, colours, strict=True))
        )
        return BlockDraw(torch.tensor([], dtype=torch.long), blocks, questions, tuple(map(int, others)))


KINDS: dict[str, Callable[..., BlockTask]] = {
    "plain": lambda name, pairs, **more: BindingTask("plain", pairs, **more),
    "chat": lambda name, pairs, **more: BindingTask(CHAT[name], pairs, **more),
    "worked": lambda name, pairs, **more: Worked("plain", pairs, **more),
    "line": lambda name, pairs, **more: Line("plain", pairs, **more),
    "tokens": lambda name, pairs, **more: Tokens(pairs, **more),
}


# --- 1. answers ---


def asked(model: Any, task: BlockTask, folder: Path, seed: int) -> pd.DataFrame:
    """The answers of each prompt of all lists, with one pass over the lines of a list. One head is read with them."""
    tls.positional_symbolic(model, task, mode="key", heads=[(0, 0)], folder=folder, seed=seed)
    files = [folder / f"key_draw{draw}.parquet" for draw in task.seeds(seed)]
    tables = [unbundled(read_table(file))["answers"].assign(draw=number) for number, file in enumerate(files)]
    return pd.concat(tables, ignore_index=True)


@app.command()
def answers(name: str) -> None:
    """Ask a packaged model in four kinds of prompts."""
    torch.set_num_threads(1)
    model, rows = tls.load_model(name), []
    for kind in ("plain", "chat", "worked", "line"):
        for pairs in PAIRS:
            started = time.process_time()
            table = asked(model, KINDS[kind](name, pairs, draws=4), RUNS / f"answers_{name}_{kind}_{pairs}", 1)
            rows.append({"model": name, "kind": kind, "pairs": pairs, **summary(table)})
            typer.echo(f"{rows[-1]} {time.process_time() - started:.0f} CPU s")
    pd.DataFrame(rows).to_csv(RUNS / f"{name}_answers.csv", index=False)


@app.command()
def again(name: str, kind: str, pairs: int) -> None:
    """Ask a model in one kind of prompts on the ten lists of part 3, and keep the answers beside the first ones."""
    torch.set_num_threads(1)
    task = KINDS[kind](name, pairs)
    table = asked(loaded(name), task, RUNS / f"again_{name}_{kind}_{pairs}", 2)
    row = {"model": name, "kind": kind, "pairs": pairs, "lists": len(task.seeds(2)), **summary(table)}
    typer.echo(row)
    pd.DataFrame([row]).to_csv(RUNS / f"{name}_{kind}_{pairs}_again.csv", index=False)


def summary(table: pd.DataFrame) -> dict[str, float]:
    """Number of prompts, share that is answered, and the means of probability, its share among the choices, chance."""
    means = table.assign(first=table["rank"] == 1)[["first", "probability", "relative_probability", "chance"]].mean()
    return {"prompts": len(table), **means.to_dict()}


# --- 2. small models that answer ---


@app.command()
def train(seed: int) -> None:
    """Train a small model on the random-map task as tiny-rope was, with another seed, and keep its weights."""
    torch.set_num_threads(1)
    started = time.process_time()
    run = trained_on_maps(CONFIG, RandomMapTask(), TrainingSettings(seed=seed))
    RUNS.mkdir(parents=True, exist_ok=True)
    torch.save(run.model.state_dict(), RUNS / f"trained-{seed}.pt")
    typer.echo(f"{time.process_time() - started:.0f} CPU s\n{run.history.tail(1).to_string()}")


def loaded(name: str) -> Any:
    """A packaged model, or a model that `train` has kept."""
    if not name.startswith("trained-"):
        return tls.load_model(name)
    model = AttentionOnlyTransformer(CONFIG)
    model.load_state_dict(torch.load(RUNS / f"{name}.pt"))
    return model.to_model()


# --- 3 and 4. scores at several tau, by two lists of swaps ---


def weights_of(folder: Path, mode: str, task: BlockTask, seed: int, what: str = "heads") -> Iterator[pd.DataFrame]:
    """Tables of attention weights before and after all swaps of each list, from the folder of a finished measurement.

    `what`: "heads" or "frequencies". A row per query, layer, head (and rotary pair).
    """
    name = f"{mode}_frequencies_draw" if what == "frequencies" else f"{mode}_draw"
    for draw in task.seeds(seed):
        whole = folder / f"{name}{draw}.parquet"
        if not whole.exists():
            whole = folder / f"{mode}_frequencies_draw{draw}.parquet"
        stem = whole.with_suffix("").name
        swapped = sorted(folder.glob(f"{stem}_swaps*.parquet"), key=lambda file: int(file.stem.rsplit("swaps", 1)[1]))
        parts = [unbundled(read_table(file)) for file in (whole, *swapped)]
        parts[0].pop("answers", None)
        yield joined_columns([{what: part[what]} for part in parts])[what]


def scored(rows: pd.DataFrame, swaps: list[tuple[int, int]], share: float) -> pd.DataFrame:
    """Scores of each row of a table of weights, with tau as a share of the row's own largest difference."""

    def slots(names: list[str]) -> torch.Tensor:
        return torch.tensor(rows[names].to_numpy(np.float64).T).unflatten(0, (-1, 2)).mT.contiguous()

    before = slots([f"before_{block}" for swap in swaps for block in swap])
    after = slots([f"{slot}_{i}_{j}" for i, j in swaps for slot in ("first", "second")])
    seen = (before.amax(-1) > 0) & (after.amax(-1) > 0)
    largest = (before[..., 0] - before[..., 1]).abs().where(seen, 0.0).amax(0)
    # Cosines do not depend on the size of the weights, so the rescaled weights have tau in units of the difference.
    scores = swap_scores(before / largest.where(largest > 0, 1.0)[:, None], after, share)
    keys = [key for key in ("query", "layer", "head", "frequency") if key in rows]
    columns = {name: getattr(scores, name).numpy() for name in ("s_pos", "s_sym", "alpha_ess")}
    return rows[keys].reset_index(drop=True).assign(**columns, tau=(share * largest).numpy())


def all_scores(tables: list[pd.DataFrame], task: BlockTask) -> pd.DataFrame:
    """Scores of each list and query (and head) at every tau, by both lists of swaps."""
    blocks = swapped_blocks(task)
    found = []
    for swaps in ("all", "kept"):
        chosen = chosen_swaps(task.n_blocks, swaps, blocks)
        for share in TAU:
            for draw, rows in enumerate(tables):
                found.append(scored(rows, chosen, share).assign(draw=draw, share=share, swaps=swaps))
    return pd.concat(found, ignore_index=True)


def of_heads(scores: pd.DataFrame) -> pd.DataFrame:
    """Means over lists and queries of each head, tau and list of swaps."""
    return scores.groupby(["swaps", "share", *HEADS])[["s_pos", "s_sym", "alpha_ess", "tau"]].mean().reset_index()


def called(heads: pd.DataFrame) -> pd.Series:
    """1 for heads that are called positional, -1 for symbolic heads, 0 for the others."""
    difference = heads["s_pos"] - heads["s_sym"]
    return (difference > CALLED).astype(int) - (difference < -CALLED).astype(int)


@app.command()
def sensitivity(name: str) -> None:
    """Score the stored set-up at four tau, by all swaps and by those without the first block."""
    torch.set_num_threads(1)
    started = time.process_time()
    task, folder = BindingTask("plain", 16), RUNS / f"sensitivity_{name}"
    default = tls.positional_symbolic(tls.load_model(name), task, mode="key", swaps="all", folder=folder)
    heads = of_heads(all_scores(list(weights_of(folder, "key", task, 0)), task))
    check(heads.query("swaps == 'all' and share == .1"), default)
    check(heads.query("swaps == 'kept' and share == .1"), read_table(FOLDER / f"heads_{name}_binding16.parquet"))
    index = (default["exclusion_index"] > 0.5).to_numpy()
    heads.assign(model=name).round(6).to_csv(RUNS / f"{name}_sensitivity_heads.csv", index=False)
    typer.echo(f"index above .5: {index.sum()} of {len(index)} heads")
    typer.echo(sensitivity_table(heads.assign(model=name)).round(3).to_string(index=False))
    typer.echo(f"{time.process_time() - started:.0f} CPU s")


def check(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Refuse scores that differ from those of the library."""
    both = ours.merge(theirs, on=HEADS, suffixes=("", "_library"))
    for score in ("s_pos", "s_sym", "alpha_ess"):
        # Stored scores are of another pass in float32: 6e-6 measured. Another tau or list of swaps moves them by 1e-2.
        np.testing.assert_allclose(both[score], both[f"{score}_library"], rtol=0, atol=1e-4)


def sensitivity_table(heads: pd.DataFrame) -> pd.DataFrame:
    """Medians and counts of each model, list of swaps and tau."""
    rows = []
    for model, of_model in heads.groupby("model"):
        wide = of_model.assign(difference=of_model["s_pos"] - of_model["s_sym"]).pivot(
            index=HEADS, columns=["swaps", "share"], values="difference"
        )
        for (swaps, share), one in of_model.groupby(["swaps", "share"]):
            calls = called(one)
            rows.append({
                "model": model, "swaps": swaps, "share": share, "tau": one["tau"].median(),
                **one[["s_pos", "s_sym", "alpha_ess"]].median().to_dict(),
                "positional": (calls == 1).sum(), "symbolic": (calls == -1).sum(), "neither": (calls == 0).sum(),
                "with_default": wide["kept", 0.1].corr(wide[swaps, share], method="spearman"),
            })  # fmt: skip
    return pd.DataFrame(rows)


def called_alike(heads: pd.DataFrame) -> pd.DataFrame:
    """Numbers of heads that have one name under all settings, and of those that have both names under some."""
    rows = []
    for model, of_model in heads.groupby("model"):
        for within in (("all", "kept"), ("kept",), ("all",)):
            some = of_model[of_model["swaps"].isin(within)]
            calls = some.assign(call=called(some)).pivot(index=HEADS, columns=["swaps", "share"], values="call")
            least, most = calls.min(axis=1), calls.max(axis=1)
            rows.append({
                "model": model, "swaps": " and ".join(within), "positional": (least == 1).sum(),
                "symbolic": (most == -1).sum(), "neither": ((least == 0) & (most == 0)).sum(),
                "both": ((least == -1) & (most == 1)).sum(), "heads": len(calls),
            })  # fmt: skip
    return pd.DataFrame(rows)


@app.command()
def measure(
    name: str,
    kind: Annotated[str, typer.Option(help="Kind of prompts: plain, chat, worked, line, tokens.")] = "tokens",
    pairs: Annotated[int, typer.Option(help="Names with a colour.")] = 16,
    lists: Annotated[int, typer.Option(help="Lists of names.")] = 10,
) -> None:
    """Run B.5 on a model, by words that swap and by keys that swap, and write what follows at each tau."""
    torch.set_num_threads(1)
    model, task = loaded(name), KINDS[kind](name, pairs, draws=lists)
    rows, scores, nulls = [], {}, {}
    for mode in ("key", "prompt"):
        started, folder = time.process_time(), RUNS / f"b5_{name}_{kind}_{pairs}_{mode}"
        options: dict[str, Any] = {"mode": mode, "swaps": "all", "folder": folder, "seed": 2}
        wide = tls.positional_symbolic(model, task, per_frequency=True, **options)
        default = tls.positional_symbolic(model, task, **options)
        typer.echo(f"{mode}: {time.process_time() - started:.0f} CPU s, {wide.attrs['answers']}")
        scores[mode] = all_scores(list(weights_of(folder, mode, task, 2)), task)
        check(of_heads(scores[mode]).query("swaps == 'all' and share == .1"), default)
        by_pair = all_scores(list(weights_of(folder, mode, task, 2, "frequencies")), task)
        for (swaps, share), one in scores[mode].groupby(["swaps", "share"]):
            slow = halves(by_pair[(by_pair["swaps"] == swaps) & (by_pair["share"] == share)])
            rows.append({
                "model": name, "kind": kind, "pairs": pairs, "lists": lists, "mode": mode, "swaps": swaps,
                "share": share, "answered": wide.attrs["answers"]["first"],
                **statements(one, default["layer"].nunique()), **slow,
            })  # fmt: skip
        kept = of_heads(scores[mode]).assign(model=name, mode=mode)
        kept.round(6).to_csv(RUNS / f"b5_{name}_{mode}_heads.csv", index=False)
        nulls[mode] = default.attrs["correlation"]["null_mean"]
    table = pd.DataFrame(rows).merge(words_and_keys(scores), on=["swaps", "share"])
    table["null"] = table["mode"].map(nulls).where((table["swaps"] == "all") & (table["share"] == 0.1))
    table.to_csv(RUNS / f"b5_{name}.csv", index=False)
    typer.echo(table.drop(columns=["kind", "pairs", "lists"]).round(3).to_string(index=False))


def statements(scores: pd.DataFrame, n_layers: int) -> dict[str, Any]:
    """What Figures 1B and 7 and footnote 2 of PS say, of one tau and one list of swaps."""
    heads = scores.groupby(HEADS)[["s_pos", "s_sym", "alpha_ess", "tau"]].mean().reset_index()
    by_place = scores.groupby(["query", *HEADS])[["s_pos", "s_sym"]].mean().groupby("query").median()
    places = by_place.reset_index(drop=True)
    place = pd.Series(range(len(places)))
    calls = called(heads)
    row = {
        **heads[["s_pos", "s_sym", "alpha_ess", "tau"]].median().to_dict(),
        "positional": int((calls == 1).sum()), "symbolic": int((calls == -1).sum()),
        "r": heads["s_pos"].corr(heads["s_sym"]),
        **{f"place_{score}": places[score].corr(place, method="spearman") for score in ("s_pos", "s_sym")},
    }  # fmt: skip
    if n_layers >= 4:
        for test in median_tests(heads).to_dict("records"):
            row |= {f"{test['score']}_{part}": test[part] for part in ("early_median", "late_median", "pvalue")}
    return row


def halves(scores: pd.DataFrame) -> dict[str, float]:
    """Figure 1C: medians over heads in the faster and the slower half of the rotary pairs, and lists that agree."""
    slower = scores["frequency"] >= scores["frequency"].max() / 2
    heads = scores.assign(half=np.where(slower, "slow", "fast")).groupby(["draw", "half", *HEADS])
    by_list = heads[["s_pos", "s_sym"]].mean().groupby(["draw", "half"]).median().unstack("half")
    positional, symbolic = (by_list[score, fast] > by_list[score, slow] for score, fast, slow in FIGURE_1C)
    agree = positional & symbolic
    means = {f"{score}_{half}": by_list[score, half].mean() for score, half in by_list.columns}
    return {**means, "lists_as_1c": int(agree.sum())}


def words_and_keys(scores: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Rank correlations over heads of scores by words that swap and by keys that swap, at each tau."""
    both = of_heads(scores["prompt"]).merge(of_heads(scores["key"]), on=["swaps", "share", *HEADS])
    rows = [
        {"swaps": swaps, "share": share}
        | {f"keys_{one}": group[f"{one}_x"].corr(group[f"{one}_y"], method="spearman") for one in ("s_pos", "s_sym")}
        for (swaps, share), group in both.groupby(["swaps", "share"])
    ]
    return pd.DataFrame(rows)


@app.command()
def page() -> None:
    """Write the tables of all models that were measured, and print the rows of docs/results/positional.md."""
    files = [*sorted(RUNS.glob("*_answers.csv")), *sorted(RUNS.glob("*_again.csv"))]
    answered = pd.concat([pd.read_csv(file) for file in files], ignore_index=True).fillna({"lists": 4})
    heads = pd.concat([pd.read_csv(file) for file in sorted(RUNS.glob("*_sensitivity_heads.csv"))], ignore_index=True)
    b5 = [file for file in sorted(RUNS.glob("b5_*.csv")) if not file.stem.endswith("_heads")]
    models = pd.concat([pd.read_csv(file) for file in b5], ignore_index=True)
    of_b5 = pd.concat([pd.read_csv(file) for file in sorted(RUNS.glob("b5_*_heads.csv"))], ignore_index=True)
    tables = {
        "swapped_words_answers": answered.astype({"lists": int}),
        "sensitivity": sensitivity_table(heads),
        "sensitivity_calls": called_alike(heads),
        "swapped_words": models,
        "swapped_words_heads": of_b5[(of_b5["swaps"] == "all") & of_b5["model"].isin(models["model"])],
    }
    for name, table in tables.items():
        table.round(4).to_csv(FOLDER / f"{name}.csv", index=False)
    typer.echo("\n".join(rows_of_page()))
    typer.echo(tables["sensitivity_calls"].to_string(index=False))
    typer.echo(tables["swapped_words"].round(3).to_string(index=False))


SHORT = {"smollm2-135m": "SmolLM2", "gemma3-270m": "Gemma", "tiny-rope": "`tiny-rope`"}


def cells(*values: Any) -> str:
    """A row of a Markdown table; numbers below 1 lose their zero."""
    texts = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
    return "| " + " | ".join(re.sub(r"(?<![0-9])0[.]", ".", text) for text in texts) + " |"


def rows_of_page() -> Iterator[str]:
    """Rows of the three tables of docs/results/positional.md, from the stored tables."""
    answered = pd.read_csv(FOLDER / "swapped_words_answers.csv")
    first = answered[answered["lists"] == 4].pivot(index=["model", "kind"], columns="pairs", values="first")
    for model in CHAT:
        for kind in ("plain", "chat", "worked", "line"):
            yield cells(SHORT[model], kind, *map(float, first.loc[model, kind]))
    for name, table in pd.read_csv(FOLDER / "sensitivity.csv").groupby("model", sort=False):
        by_swaps = table.set_index(["swaps", "share"])
        for share in TAU:
            both = [by_swaps.loc[swaps, share] for swaps in ("kept", "all")]
            scores = [float(one[score]) for one in both for score in ("s_pos", "s_sym", "alpha_ess")]
            calls = [f"{one['positional']:.0f}, {one['symbolic']:.0f}" for one in both]
            yield cells(SHORT[str(name)], str(share), *scores[:3], calls[0], *scores[3:], calls[1])
    heads = pd.read_csv(FOLDER / "swapped_words_heads.csv").query("mode == 'prompt'")
    models = pd.read_csv(FOLDER / "swapped_words.csv").query("mode == 'prompt' and swaps == 'all'")
    for row in models.itertuples():
        of_model = heads[(heads["model"] == row.model) & (heads["share"] == row.share)].groupby("layer")
        least, most = of_model[["s_pos", "s_sym"]].min(), of_model[["s_pos", "s_sym"]].max()
        spans = [f"{least.loc[at, one]:.2f} to {most.loc[at, one]:.2f}" for at in (0, 1) for one in ("s_pos", "s_sym")]
        yield cells(SHORT.get(row.model, f"seed {row.model[-1]}"), str(row.share), *spans, float(row.r),
            float(row.place_s_pos), float(row.place_s_sym), f"{row.lists_as_1c} of {row.lists}")  # fmt: skip


if __name__ == "__main__":
    app()
