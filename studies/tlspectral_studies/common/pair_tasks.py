"""Pairs of prompts in English whose answers small models know: names, years, agreement, capitals, opposites.

The clean prompt and its counterfactual have one template and as many tokens. Words that a tokenizer splits are left out
of the draw, so that this holds for every model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

import tlspectral as tls
from tlspectral.tasks import Task

# fmt: off
NAMES = ("Mary", "John", "Tom", "James", "Sarah", "Anna", "David", "Peter", "Michael", "Laura", "Robert", "Emma",
    "Daniel", "Lisa", "Mark", "Paul", "Kevin", "Alice", "Henry", "Jack", "Susan", "Kate", "Simon", "Martin")
PLACES = ("store", "park", "school", "office", "station", "library")
OBJECTS = ("book", "drink", "ring", "bag", "letter", "gift")
SUBJECTS = {one: one + "s" for one in ("boy", "girl", "dog", "teacher", "doctor", "car", "student", "friend",
    "farmer", "king", "cat", "writer", "artist", "player", "driver", "book", "chair", "tree", "nurse", "lawyer",
    "singer", "bird")}
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "Russia": "Moscow", "England": "London", "Austria": "Vienna", "Greece": "Athens", "Egypt": "Cairo",
    "China": "Beijing", "Cuba": "Havana"}
OPPOSITES = {"hot": "cold", "big": "small", "old": "young", "up": "down", "good": "bad", "fast": "slow",
    "open": "closed", "high": "low", "left": "right", "black": "white", "happy": "sad", "rich": "poor",
    "strong": "weak", "long": "short", "early": "late", "dark": "light", "wet": "dry", "full": "empty", "true": "false",
    "hard": "soft", "north": "south", "east": "west"}
# fmt: on
IOI_TEMPLATES = (
    "When {a} and {b} went to the {place}, {s} gave a {object} to",
    "Then, {a} and {b} had a long talk at the {place}. Afterwards {s} handed a {object} to",
    "After {a} and {b} arrived at the {place}, {s} decided to give a {object} to",
    "While {a} and {b} were working at the {place}, {s} passed a {object} to",
)

_TRIES = 50  # draws for one pair

PairTask = Literal["ioi swapped", "ioi other names", "greater than", "agreement", "capitals", "opposites"]
Start = Literal["own", "none", "end of text"]


def pair_task(
    model: Any,
    name: PairTask,
    *,
    n: int = 64,
    seed: int = 0,
    templates: Sequence[str] = IOI_TEMPLATES,
    start: Start = "own",
) -> Task:
    """Return a task of pairs, its metric the logit of the right answer less that of the counterfactual's.

    No pair is drawn twice, and none with its sides exchanged, so that halves of a task have none in common.

    Args:
        model: gives the tokenizer, which decides which words are one token.
        name: `"ioi swapped"`: indirect objects (Wang et al. 2023), the counterfactual repeats the other name, so the
            second subject alone differs; `"ioi other names"`: three other names in its place. `"greater than"`: years
            (Hanna et al. 2023), a set of answers on either side. `"agreement"` of verb and subject, `"capitals"`,
            `"opposites"`.
        n: number of pairs. Raises ValueError where there are not so many.
        seed: of the draw.
        templates: of which those of indirect objects are drawn.
        start: what the prompts begin with: the token that `model.to_tokens` puts there, none, or `<|endoftext|>` or
            `<eos>`, which some models have seen there in training.
    """
    drawn = np.random.default_rng(seed)
    makers: dict[str, Callable[[], tuple[Any, ...]]] = {
        "ioi swapped": lambda: _ioi(model, drawn, templates, others=False),
        "ioi other names": lambda: _ioi(model, drawn, templates, others=True),
        "greater than": lambda: _greater_than(model, drawn),
        "agreement": lambda: _agreement(model, drawn),
        "capitals": lambda: _of_two(model, drawn, CAPITALS, "The capital of {} is the city of"),
        "opposites": lambda: _of_two(model, drawn, OPPOSITES, 'The opposite of "{}" is "'),
    }
    different: dict[frozenset[str], tuple[Any, ...]] = {}
    for _ in range(_TRIES * n):
        pair = makers[name]()
        different.setdefault(frozenset(pair[:2]), pair)
        if len(different) == n:
            break
    else:
        raise ValueError(f"{name}: {n} different pairs were asked for, and {len(different)} were found: ask for fewer")
    prompts, others, right, wrong = zip(*different.values(), strict=True)
    both = [[_with_start(model, prompt, start) for prompt in side] for side in (prompts, others)]
    return tls.logit_difference(both[0], list(right), list(wrong), counterfactual=both[1], name=name)


def _with_start(model: Any, prompt: str, start: Start) -> str | list[int]:
    """Return a prompt as text, which gets the model's own start token, or as ids that begin otherwise."""
    if start == "own":
        return prompt
    ids = model.tokenizer(prompt, add_special_tokens=False).input_ids
    return ids if start == "none" else [model.tokenizer.convert_tokens_to_ids(_end_of_text(model)), *ids]


def _end_of_text(model: Any) -> str:
    known = model.tokenizer.get_vocab()
    return next((token for token in ("<|endoftext|>", "<eos>", "</s>") if token in known), model.tokenizer.eos_token)


def _one_token(model: Any, words: Iterable[str], *, space: bool = True) -> list[str]:
    """Return the words that are one token, behind a space."""
    encode = model.tokenizer
    return [word for word in words if len(encode(" " * space + word, add_special_tokens=False).input_ids) == 1]


def _ioi(model: Any, drawn: np.random.Generator, templates: Sequence[str], *, others: bool) -> tuple[str, ...]:
    a, b, c, d = drawn.permutation(_one_token(model, NAMES))[:4]
    first, second = drawn.permutation([a, b])
    place, thing = (str(drawn.choice(_one_token(model, words))) for words in (PLACES, OBJECTS))
    words = {"place": place, "object": thing}
    template = str(drawn.choice(list(templates)))
    clean = template.format(a=first, b=second, s=b, **words)
    if not others:
        return clean, template.format(a=first, b=second, s=a, **words), f" {a}", f" {b}"
    e = str(drawn.permutation([name for name in _one_token(model, NAMES) if name not in (a, b, c, d)])[0])
    return clean, template.format(a=c, b=d, s=e, **words), f" {a}", f" {b}"


def _greater_than(model: Any, drawn: np.random.Generator) -> tuple[str, str, list[str], list[str]]:
    """Later years as a set of right answers; digits stand alone in most tokenizers, so the decade's digit is asked."""
    century, decade = int(drawn.integers(11, 19)), int(drawn.integers(2, 9))
    template = "The war lasted from the year {c}{d}{u} to the year {c}"
    unit = int(drawn.integers(10))
    clean = template.format(c=century, d=decade, u=unit)
    other = template.format(c=century, d=0, u=unit)
    return clean, other, [str(digit) for digit in range(decade + 1, 10)], [str(digit) for digit in range(1, decade)]


def _agreement(model: Any, drawn: np.random.Generator) -> tuple[str, str, str, str]:
    pairs = {one: many for one, many in SUBJECTS.items() if len(_one_token(model, (one, many))) == 2}
    single, plural = list(pairs.items())[int(drawn.integers(len(pairs)))]
    between = str(drawn.choice(["near the trees", "behind the house", "with the red hat", "by the lake"]))
    if drawn.random() < 0.5:
        return f"The {single} {between}", f"The {plural} {between}", " is", " are"
    return f"The {plural} {between}", f"The {single} {between}", " are", " is"


def _of_two(model: Any, drawn: np.random.Generator, known: dict[str, str], template: str) -> tuple[str, str, str, str]:
    space = not template.endswith('"')
    there = [
        key
        for key, answer in known.items()
        if _one_token(model, [key], space=space) and _one_token(model, [answer], space=space)
    ]
    one, other = drawn.permutation(there)[:2]
    mark = " " * space
    return template.format(one), template.format(other), mark + known[one], mark + known[other]
