"""Rows of the conformance suite, and the register of what is asked of them."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from ablation_runs import NO_ROPE, delegated, logits, recorded
from model_state import state_of, warm

from tlspectral.heads.operators.verification import check_scores
from tlspectral.models.reading import attention_view

POINTS = ("residual", "residual_after", "attention_out", "mlp_out", "query", "key", "value", "scores", "pattern", "z",
          "cos", "sin")  # fmt: skip

# Rows that differ in what matters, of which the fast tests ask: learned positions and LayerNorm; grouped keys; a
# quarter of the columns rotated, with biases; query/key norm by head; softcap, windows and a gain less 1; adjacent
# pairs and delegated attention; ALiBi; query/key norm over heads and none in front; a factor on cos, sin; an encoder;
# latents with biases.
KINDS = {
    "bridge": ("gpt2", "llama", "neox", "qwen3", "gemma2", "gptj", "bloom", "olmo2", "yarn", "bert", "deepseek_v3"),
    "hooked": ("llama", "bloom", "qwen3"),
}
# Of these the fast tests ask only how they are read; the slow tests and those on TransformerLens 4 ask the rest.
READ_ALONE = ("neox", "olmo2", "yarn")

# Architectures of which there are bridges alone.
OF_BRIDGES = ("codegen", "gemma3n", "gemma4", "llama4", "nanochat")
# Latent attention with and without a latent of queries, with biases, with an indexer. What is refused of it is asked in
# test_latent.py.
LATENTS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm5")
LEARNED = {"conformance.spectral", "conformance.spectral_models"}
SUMS = {"conformance.circuits", "conformance.edges"}
NOT_ASKED = {
    # Keys and values have one source, or the stream is no sum of what is written.
    **dict.fromkeys(("gemma3n", "gemma4"), SUMS | LEARNED),
    # What to_spectral refuses: latents, queries that are rotated inside the wrapped module, or by negative angles.
    **dict.fromkeys((*LATENTS, "llama4", "nanochat"), LEARNED),
}


class Property(NamedTuple):
    """What is to hold, in which case, of which rows and forms, and of how many in the fast tests."""

    holds: Callable[..., None]
    case: tuple[Any, ...]
    of: Callable[..., bool]
    every: int | None
    forms: bool
    encoders: bool


PROPERTIES: list[Property] = []


class Row:
    """One model, which no property may change, and its run on the prompt of the zoo.

    `form` is "" for a raw bridge and for a HookedTransformer that keeps its norms, whose weights and biases are drawn
    at random; "compatible" for a bridge in compatibility mode, and "folded" for a HookedTransformer with folded norms.
    """

    def __init__(self, backend: str, name: str, form: str = "") -> None:
        self.backend, self.name, self.form = backend, name, form
        self.rotary, self.latent = name not in (*NO_ROPE, *zoo.ENCODERS), name in LATENTS
        self.read_right = backend == "hooked" or name not in zoo.READ_WRONG
        # The bridge leaves attention to the wrapped module, so that scores are rebuilt and z is edited.
        self.delegated = delegated(backend, name)

    def fresh(self, dtype: torch.dtype = torch.float32, positions: int | None = None) -> Any:
        """A model of one's own, for prompts of up to `positions` tokens."""
        how = {"fold_ln": self.form == "folded"} if self.backend == "hooked" else {}
        model = getattr(zoo, self.backend)(self.name, positions=positions, **how)
        if self.form == "compatible":
            model.enable_compatibility_mode(disable_warnings=True)
        return model if dtype == torch.float32 else zoo.converted(model, dtype)

    @property
    def shared(self) -> Any:
        """The model without a form that all tests of this process share."""
        return zoo.shared("bridge" if self.backend == "bridge" else "unfolded", self.name)

    @cached_property
    def model(self) -> Any:
        """The model, as it was before the first property acted on it: see `state` and `logits`."""
        model = warm(self.fresh() if self.form else self.shared)
        self.state, self.logits = state_of(model), logits(model)
        return model

    @cached_property
    def view(self) -> Any:
        return attention_view(self.model)

    @cached_property
    def layers(self) -> range:
        return range(self.view.n_layers)

    @cached_property
    def run(self) -> dict[tuple[int, str], Any]:
        """What passes the hook points, by (layer, point). Not to be changed."""
        return recorded(self.model, POINTS)

    @property
    def captured(self) -> dict[str, Any]:
        """The same by the model's own names of its hook points."""
        return {self.view.hook_names(layer)[point]: value for (layer, point), value in self.run.items()}

    @cached_property
    def check(self) -> Any:
        return check_scores(self.view)


def right(row: Row, *case: Any) -> bool:
    """Whether the model's scores are those of its published weights: TransformerLens 3.9 errs on one architecture."""
    return row.read_right


def of_heads_alone(row: Row, *case: Any) -> bool:
    """Whether every head has queries and keys of its own, so that its score can be written as a sum."""
    return not row.latent


def rotating(row: Row, *case: Any) -> bool:
    return row.rotary


def rotating_right(row: Row, *case: Any) -> bool:
    return row.rotary and row.read_right


def asked(
    of: Callable[..., bool] = lambda row, *case: True,
    every: int | None = None,
    forms: bool = False,
    encoders: bool = False,
    **cases: Iterable[Any],
) -> Any:
    """Ask a property of the rows and cases that `of` picks, once for every combination of the values of `cases`.

    The fast tests ask it of the rows of `KINDS`, the slow ones of all others. What costs much has `every`: the fast
    tests ask it of one row of `KINDS` in so many, another one for each case, the slow tests of every third one that is
    left and of every fourth other row, with `--full` of all. `forms`: the slow tests ask it of compatibility mode and
    of folded models too. `encoders`: of these too.
    """

    def register(holds: Callable[..., None]) -> Callable[..., None]:
        PROPERTIES.extend(
            Property(holds, case, of, every, forms, encoders) for case in itertools.product(*cases.values())
        )
        return holds

    return register


def costly(place: int, one_in: int, of_kinds: bool) -> list[Any]:
    """The marks of what costs much, by the place of its row and its own."""
    if of_kinds and place % one_in == 0:
        return []
    left_out = place // one_in % 3 if of_kinds else place % 4
    return [pytest.mark.slow, pytest.mark.full] if left_out else [pytest.mark.slow]


def label(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(str(part) for part in value if part)
    return str(value)


def cases(backend: str, form: str = "") -> Iterator[Any]:
    """Every property of every row of a backend, as pytest takes them: the row, what is to hold, and the case."""
    names = zoo.HOOKED_ARCHITECTURES
    if backend == "bridge":
        names = (
            zoo.ARCHITECTURES
            if form
            else (*zoo.ARCHITECTURES, *zoo.LENGTH_DEPENDENT, *OF_BRIDGES, *LATENTS, *zoo.ENCODERS_HERE)
        )
    kinds = KINDS[backend]
    for number, name in enumerate(names):
        row = Row(backend, name, form)
        for turn, (holds, case, of, every, forms, encoders) in enumerate(PROPERTIES):
            of_reading = holds.__module__ in ("conformance.reading", "conformance.untouched")
            wrong_kind = holds.__module__ in NOT_ASKED.get(name, ()) or (name in zoo.ENCODERS and not encoders)
            if wrong_kind or not of(row, *case) or (form and not forms):
                continue
            marks = [*getattr(holds, "pytestmark", []), *([zoo.needs_hooked] if backend == "hooked" else [])]
            if every or form:
                one_in, place = (every or 1) * (2 if form else 1), kinds.index(name) if name in kinds else number
                marks += costly(place + turn, one_in, name in kinds)
            elif name not in kinds:
                marks += [pytest.mark.slow, pytest.mark.tl4]
            if pytest.mark.slow not in marks and (form or (not of_reading and name in READ_ALONE)):
                marks += [pytest.mark.slow, pytest.mark.tl4]
            said = "-".join([name, holds.__name__, *map(label, case)])
            yield pytest.param((backend, name, form), holds, case, id=said, marks=marks)
