"""How often `sufficient_heads` finds a set of heads that is known, and its level where no set carries the task.

    python benchmarks/planted_sets.py            # docs/results/sufficient, a file for each kind and level.csv
    python benchmarks/planted_sets.py page       # the rows of docs/results/head_sets.md, from these files

Models of four layers of eight heads, written by hand. Every head attends to all tokens alike. One token of a prompt
carries a sign; its pair has a neutral token there. A head reads the sign and writes to the answer's direction:

* `additive` heads write equal parts of the answer.
* A `chain` is two heads: the first writes the sign where only the second reads it, so each works only with the other.
* A `redundant` pair is two heads of which either suffices: an MLP caps the sum of what both write.
* All other heads write small random parts, which differ from token to token (standard deviation .02 of the answer).

`planted`: six models of each kind, n is the size of the smallest set, with default settings on 8 pairs; 12 held pairs
have other signs, answers and words. A set is found if it has all additive heads, the chain and one redundant head.

`level`: 40 models in which all 32 heads write 1/32 of the answer on average, with a standard deviation of .06 over
tokens and heads. No five heads carry the task (their mean is .16), and on held tokens no five are better than others.
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
from tlspectral_studies.common.markdown_table import markdown_table
from transformers import LlamaConfig, LlamaForCausalLM

import tlspectral as tls

FOLDER = Path("docs/results/sufficient")
LAYERS, HEADS, WIDTH, LENGTH, AT = 4, 8, 64, 8, 3
PAIRS, HELD = 8, 12
SEEDS, LEVEL_SEEDS = 6, 40
NOISE, LEVEL_NOISE = 0.02, 0.06

CONSTANT, SIGN, ANSWER, BETWEEN, CAPPED = range(5)
"""Directions of the residual stream with a meaning; 8 to 39 carry each head's own noise, the others the words."""
OWN, WORDS = slice(8, 40), slice(40, 64)
NEUTRAL, SIGNED, ANSWERS, FILLERS = 1, 2, 2 + PAIRS + HELD, 2 + PAIRS + HELD + 8
"""Token ids: the neutral token, then a signed token for each pair, eight answers, and words."""
VOCABULARY = FILLERS + 40
CAP = 0.15  # of the sum of a redundant pair, in units of the stream behind the norm


class Planted(NamedTuple):
    """A kind of planted set.

    Attributes:
        additive: number of additive heads.
        chain: True for two heads that work only together.
        redundant: True for two heads of which either suffices.
    """

    additive: int
    chain: bool = False
    redundant: bool = False

    @property
    def size(self) -> int:
        """Number of heads in a smallest set."""
        return self.additive + 2 * self.chain + self.redundant

    @property
    def words(self) -> str:
        """Name of the kind in tables."""
        return f"{self.additive} additive" + ", a chain" * self.chain + ", a redundant pair" * self.redundant


KINDS = (Planted(2), Planted(3), Planted(4), Planted(5), Planted(6), Planted(2, True), Planted(2, False, True),
    Planted(2, True, True))  # fmt: skip


class Model(NamedTuple):
    """A planted model.

    Attributes:
        model: the model, loaded.
        additive, chain, redundant: names of the planted heads.
    """

    model: Any
    additive: list[str]
    chain: list[str]
    redundant: list[str]


def planted_model(kind: Planted | None, seed: int) -> Model:
    """Return a model with a planted set, or one in which all heads carry the answer alike (`kind=None`)."""
    drawn = np.random.default_rng(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=32,
        tie_word_embeddings=False)  # fmt: skip
    config._attn_implementation = "eager"
    built = LlamaForCausalLM(config).float().eval()
    size = WIDTH // HEADS
    places = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    # A chain needs an earlier and a later layer; the cap is in the last layer, behind its attention.
    order = [places[place] for place in drawn.permutation(len(places))]
    chain: list[tuple[int, int]] = []
    if kind is not None and kind.chain:
        chain = next([first, second] for first, second in combinations(sorted(order[:16]), 2) if first[0] < second[0])
    free = [place for place in order if place not in chain]
    redundant = free[: 2 * (kind is not None and kind.redundant)]
    additive = free[len(redundant) :][: 0 if kind is None else kind.additive]
    parts = 1 if kind is None else kind.additive + kind.chain + kind.redundant
    noise, share = (LEVEL_NOISE, 1 / len(places)) if kind is None else (NOISE, 0.0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        signs = np.where(np.arange(PAIRS + HELD) % 2, -1.0, 1.0)
        embedding = np.zeros((VOCABULARY, WIDTH))
        embedding[:, CONSTANT] = 6.0
        embedding[:, WORDS] = drawn.standard_normal((VOCABULARY, WIDTH - WORDS.start)) * 0.6
        signed = slice(SIGNED, ANSWERS)
        embedding[signed, WORDS] = embedding[NEUTRAL, WORDS]
        embedding[signed, SIGN] = signs
        embedding[signed, OWN] = signs[:, None] * (share + noise * drawn.standard_normal((PAIRS + HELD, len(places))))
        built.model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
        head = np.zeros((VOCABULARY, WIDTH))
        head[ANSWERS:FILLERS, ANSWER] = 8.0 * np.tile([1.0, -1.0], 4)
        built.lm_head.weight.copy_(torch.from_numpy(head))
        for number, (layer, index) in enumerate(places):
            attention: Any = built.model.layers[layer].self_attn
            values, output = np.zeros((size, WIDTH)), np.zeros((WIDTH, size))
            values[0, OWN.start + number] = 1.0
            output[ANSWER, 0] = LENGTH
            values[2:, WORDS] = drawn.standard_normal((size - 2, WIDTH - WORDS.start)) * 0.2
            output[WORDS, 2:] = drawn.standard_normal((WIDTH - WORDS.start, size - 2)) * 0.05
            if (layer, index) in additive:
                values[0, SIGN] = 1 / parts
            elif (layer, index) in redundant:
                values[1, SIGN], output[CAPPED, 1] = 1.0, 1.5 * CAP * LENGTH
            elif (layer, index) in chain[:1]:
                values[1, SIGN], output[BETWEEN, 1] = 1.0, LENGTH
            elif (layer, index) in chain:
                seen = sum(1 / (place + 1) for place in range(AT, LENGTH))  # mean of the first head's means
                values[1, BETWEEN], output[ANSWER, 1] = 1.0, 1 / parts / seen
            rows = slice(index * size, (index + 1) * size)
            attention.v_proj.weight[rows] = torch.from_numpy(values).float()
            attention.o_proj.weight[:, rows] = torch.from_numpy(output).float()
        if redundant:
            _cap(built.model.layers[-1].mlp, 1 / parts)
    names = [[f"L{layer}H{index}" for layer, index in sorted(some)] for some in (additive, chain, redundant)]
    return Model(tls.load_model(built), *names)


def _cap(mlp: Any, share: float) -> None:
    """Let an MLP add to the answer the capped sum of a redundant pair, times `share` at the cap."""
    steep, level = 60.0, 6.0 / np.sqrt((36 + 0.36 * 24) / WIDTH)  # the constant direction behind the norm, about
    cap = CAP / np.sqrt((36 + 0.36 * 24) / WIDTH)
    for row, side in enumerate((1.0, -1.0)):
        mlp.gate_proj.weight[row, CAPPED] = steep
        mlp.gate_proj.weight[row, CONSTANT] = side * steep * cap / level
        mlp.up_proj.weight[row, CONSTANT] = 1.0 / level
        mlp.down_proj.weight[ANSWER, row] = side * share / (steep * cap)


def tasks_of(seed: int) -> tuple[tls.Task, tls.Task]:
    """Return the task and the held pairs: other signed tokens, other answers, other words."""
    drawn, made = np.random.default_rng([seed, 1]), []
    for first, n, answers in ((0, PAIRS, 0), (PAIRS, HELD, 4)):
        prompts, pairs, right, wrong = [], [], [], []
        for number in range(first, first + n):
            words = (FILLERS + drawn.permutation(40)[: LENGTH - 1]).tolist()
            prompts.append([0, *words[: AT - 1], SIGNED + number, *words[AT - 1 : LENGTH - 2]])
            pairs.append([*prompts[-1][:AT], NEUTRAL, *prompts[-1][AT + 1 :]])
            pair = ANSWERS + answers + 2 * int(drawn.integers(2))
            right.append(pair + number % 2)
            wrong.append(pair + 1 - number % 2)
        made.append(tls.logit_difference(prompts, right, wrong, counterfactual=pairs, name="planted"))
    return made[0], made[1]


def is_found(heads: list[str], planted: Model) -> bool:
    """Return whether a set has all additive heads, the chain and one head of the redundant pair, and no other head."""
    needed = {*planted.additive, *planted.chain}
    return needed <= {*heads} and len({*heads} & {*planted.redundant}) >= bool(planted.redundant)


def rows_of_kind(kind: Planted) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed: which sets were found, and what they keep on held pairs."""
    for seed in range(SEEDS):
        planted = planted_model(kind, seed)
        table = tls.sufficient_heads(planted.model, *tasks_of(seed), n=kind.size, seed=seed)
        sets = pd.DataFrame(table.attrs["sets"]).set_index("set")
        redundant = {*table.attrs["heads"]} & {*planted.redundant}
        yield {
            "kind": kind.words, "n": kind.size, "seed": seed,
            **{name: is_found(sets.loc[name, "heads"], planted) for name in ("learned", "single effects", "EAP")},
            "fits": np.mean([is_found(fit["heads"], planted) for fit in table.attrs["fits"]]),
            "redundant": len(redundant), "kept": table.attrs["kept"], "verdict": table.attrs["verdict"],
            "complement": sets.loc["complement", "kept"], "p": sets.loc["random", "p"],
        }  # fmt: skip


def level(file: Path) -> None:
    """Write a row for each model in which no set carries the task; models that the file has are left out."""
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    for seed in range(len(rows), LEVEL_SEEDS):
        table = tls.sufficient_heads(planted_model(None, seed).model, *tasks_of(seed), seed=seed)
        sets = pd.DataFrame(table.attrs["sets"]).set_index("set")
        rows.append({
            "seed": seed, "kept": table.attrs["kept"], "kept_training": table.attrs["kept_training"],
            "verdict": table.attrs["verdict"], "p": sets.loc["random", "p"],
        })  # fmt: skip
        pd.DataFrame(rows).round(4).to_csv(file, index=False)


def print_page(folder: Path) -> None:
    """Print the rows of the page."""
    planted = pd.concat([pd.read_csv(folder / f"planted-{number}.csv") for number in range(len(KINDS))])
    null = pd.read_csv(folder / "level.csv")
    rows = []
    for kind, models in planted.groupby("kind", sort=False):
        rows.append({
            "planted": str(kind), "n": str(models["n"].iloc[0]),
            **{f"found by {name}": f"{int(models[name].sum())} of {len(models)}"
               for name in ("learned", "single effects", "EAP")},
            "share of single fits": f"{models['fits'].mean():.2f}",
            "kept on held pairs": "{:.2f} ({:.2f} to {:.2f})".format(*models["kept"].agg(["mean", "min", "max"])),
            "redundant heads in the set": ", ".join(map(str, sorted(models["redundant"].unique()))),
        })  # fmt: skip
    typer.echo("\n".join(markdown_table(rows[0], (row.values() for row in rows))))
    typer.echo(
        f"level: {len(null)} models; kept {null['kept'].mean():.2f} ({null['kept'].min():.2f} to "
        f"{null['kept'].max():.2f}), on the training pairs {null['kept_training'].mean():.2f}; sufficient "
        f"{(null['verdict'] == 'sufficient').sum()}; p of .05 in {(null['p'] < 0.051).mean():.3f}, p of .2 or less in "
        f"{(null['p'] < 0.201).mean():.3f}"
    )


def main(
    step: Annotated[Literal["all", "planted", "level", "page"], typer.Argument()] = "all", folder: Path = FOLDER
) -> None:
    """Measure planted sets and the level, or print the rows of the page."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    if step in ("all", "planted"):
        for kind in KINDS:
            file = folder / f"planted-{KINDS.index(kind)}.csv"
            if not file.exists():
                pd.DataFrame(rows_of_kind(kind)).round(4).to_csv(file, index=False)
    if step in ("all", "level"):
        level(folder / "level.csv")
    if step in ("all", "page"):
        print_page(folder)


if __name__ == "__main__":
    typer.run(main)
