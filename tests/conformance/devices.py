"""A model on another device, or in 16 bits, beside the same weights on the CPU in float32.

`make test-gpu` asks this of CUDA in float32 and bfloat16. Without an accelerator the stand-in of `stand_in_device.py`
takes its place, with float64 and without: probes and self-checks run there too, and numbers are those of the CPU to the
bit. Left out, as the stand-in cannot show them: reading a model's files onto a device (`load_model` builds on the CPU
and moves, as rows do), worker processes, generation with a key/value cache, and what a real device does beside placing
tensors: its rounding, its memory, its streams.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from ablation_runs import block_parts, logits, one_of_each, rotary_parts
from explicit_patterns import CASES, worst_error
from positional_measurements import block_prompt, cut_prompt
from spectral_zoo import move
from stand_in_device import DEVICE, StandInDevice
from tlspectral_studies.positional_symbolic.traces import attention_traces, frequency_norms

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks.sweeps.bands import band_effects
from tlspectral.models.reading import attention_view
from tlspectral.spectral_rope import load_spectral, merge, save_spectral, to_spectral
from tlspectral.tasks.repeated import repeated_sequences

from .rows import KINDS, Row, label

BLOCKS = [cut_prompt(row, (16, 2, 2, 2, 2)) for row in zoo.prompt()]  # inside the zoo's window of 8


class Place(NamedTuple):
    """Where a row lies and in which type, and how far its numbers may be from those of the CPU in float32.

    Attributes:
        logits: of logits, which are of size 2, and of patterns; 0 for equal to the bit.
        tables: of numbers that hang on activations. Those of weights alone are computed in float64 everywhere.
        gradients: of a gradient's size. Autograd may add terms in another order: measured 3e-7 on the stand-in.
    """

    device: str
    dtype: torch.dtype
    logits: float
    tables: float
    gradients: float
    float64: bool = True

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        if self.device != DEVICE:
            yield
            return
        with pytest.MonkeyPatch.context() as patch, StandInDevice(float64=self.float64):
            if self.float64:  # the package uses it there, as on CUDA
                patch.setattr("tlspectral.algebra.rotary._HAVE_FLOAT64", ("cpu", "lazy"))
            yield


# Rounding of LAPACK by the alignment of memory moves tables by at most 2e-13.
STAND_INS = {
    "without_float64": Place(DEVICE, torch.float32, 0, 1e-9, 1e-5, float64=False),
    "with_float64": Place(DEVICE, torch.float32, 0, 1e-9, 1e-5),
}


def places(device: str) -> dict[str, Place]:
    """The places that are asked about on a device.

    In float32 without TensorFloat-32 sums are in another order: some 1e-6 of logits. In bfloat16 a logit of 2 is
    rounded by 4e-3 at every step. A part, an edge or a rotation that is left out moves logits by tenths in most rows.
    The bounds of a real device are guesses until one has been measured.
    """
    if device == DEVICE:
        return STAND_INS
    return {
        "float32": Place(device, torch.float32, 1e-4, 1e-4, 1e-3),
        "bfloat16": Place(device, torch.bfloat16, 0.2, 0.2, 0.3),
    }


class PlacedRow(Row):
    """A model on a device, and the same weights on the CPU in float32."""

    def __init__(self, backend: str, name: str, place: Place) -> None:
        super().__init__(backend, name)
        self.place = place

    @cached_property
    def on_cpu(self) -> Any:
        if self.place.dtype == torch.float32:
            return self._settled(self.fresh(torch.float32)) if self._settles else self.shared
        rounded = self.fresh(self.place.dtype)  # weights that 16 bits can hold
        return self._settled(zoo.converted(rounded, torch.float32))

    @cached_property
    def model(self) -> Any:
        return self._settled(self.fresh(self.place.dtype).to(self.place.device))

    @property
    def _settles(self) -> bool:
        """Whether the longest prompt changes later numbers: a HookedTransformer keeps its ALiBi, and rounds by it."""
        return self.backend == "hooked" and self.name == "bloom"

    def _settled(self, model: Any) -> Any:
        if self._settles:
            logits(model, on(model, zoo.prompt(length=model.cfg.n_ctx)))
        return model

    @property
    def coarse_tables(self) -> bool:
        """Whether cos and sin are stored in 16 bits, so that the model rotates by angles that are off by hundredths."""
        stored = self.backend == "hooked" or self.name == "gptj"
        return stored and self.rotary and self.place.dtype != torch.float32

    @property
    def of_stream(self) -> bool:
        """Whether heads read the residual stream by one norm, and it is the sum of what is written to it."""
        return not self.latent and self.name not in zoo.ENCODERS

    @property
    def both(self) -> tuple[Any, Any]:
        return self.on_cpu, self.model

    @cached_property
    def parts(self) -> list[str]:
        """Parts that every layer has: without rotary positions, what blocks add to a score is content."""
        missing = set() if self.rotary else {"rope_phase", "rotary_band", "interaction"}
        missing |= set() if self.rotary or self.name == "bloom" else {"position"}
        missing |= {"long_range", *block_parts} if self.name in zoo.ENCODERS else set()
        missing |= {"mode"} if self.latent else set()  # queries of latents have no singular modes of their own
        return [part for part in one_of_each(BLOCKS) if part not in missing]

    def agree(self, expected: torch.Tensor, found: torch.Tensor, said: str = "") -> None:
        assert found.device.type == torch.device(self.place.device).type, said
        found = found.detach().cpu()
        if self.place.logits == 0:
            assert torch.equal(found, expected.detach()), said
        else:
            assert float((found.float() - expected.detach()).abs().max()) <= self.place.logits, said

    def tables_agree(self, expected: pd.DataFrame, found: pd.DataFrame, *, of_weights: bool = False) -> None:
        """In 16 bits a number here and there hangs on a near tie, so the median is judged."""
        allowed = 1e-9 if of_weights else self.place.tables
        if of_weights or self.place.dtype == torch.float32:
            pd.testing.assert_frame_equal(expected, found, rtol=allowed, atol=allowed, check_exact=False)
            return
        assert list(found) == list(expected)
        for name in expected.select_dtypes("float"):
            difference = (found[name] - expected[name]).abs()
            assert difference.isna().equals(expected[name].isna()), name
            assert difference.isna().all() or difference.median() <= allowed, name

    def gradients_agree(self, expected: Iterable[Any], found: Iterable[Any]) -> None:
        """A term that is left out is a tenth of a gradient.

        One that is 0 but for rounding, such as that of a bias of all keys, is compared with a millionth of the largest.
        """
        pairs = [*zip(expected, found, strict=True)]
        least = 1e-6 * max(float(one.norm()) for one, _ in pairs)
        for one, other in pairs:
            assert other.device.type == torch.device(self.place.device).type
            allowed = max(self.place.gradients * float(one.norm()), least)
            assert float((one - other.cpu().float()).norm()) <= allowed


def on(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.to(attention_view(model).device)


# What is to hold, in which case, of which rows.
ON_DEVICES: list[tuple[Callable[..., None], tuple[Any, ...], Callable[..., bool], bool]] = []


def asked(of: Callable[..., bool] = lambda row, *case: True, fast: bool = False, **cases: Iterable[Any]) -> Any:
    """Ask a property of the placed rows that `of` picks; the fast tests ask it of one row if `fast`."""

    def register(holds: Callable[..., None]) -> Callable[..., None]:
        ON_DEVICES.extend((holds, case, of, fast) for case in itertools.product(*cases.values()))
        return holds

    return register


def placed_cases(device: str) -> Iterator[Any]:
    """Every property of the rows of `KINDS`, in every type of a device, as pytest takes them."""
    for (kind, place), (backend, names) in itertools.product(places(device).items(), KINDS.items()):
        for number, name in enumerate((*names, *(("gemma3", "gptneo", "smollm3", "mistral") * (backend == "bridge")))):
            row = PlacedRow(backend, name, place)
            for turn, (holds, case, of, fast) in enumerate(ON_DEVICES, number):
                # With float64 the same code runs as without, but on the device: one property of a row in three, and of
                # the row of the fast tests all. Without `--full`, other rows have one in four, and none with float64.
                again = kind == "with_float64" and turn % 3 > 0
                if not of(row, *case) or (again and name != "llama"):
                    continue
                marks = [*getattr(holds, "pytestmark", []), *([] if backend == "bridge" else [zoo.needs_hooked])]
                marks += [] if fast and not again and (backend, name) == ("bridge", "llama") else [pytest.mark.slow]
                other = device == DEVICE and name != "llama"
                marks += [pytest.mark.full] * (other and (kind == "with_float64" or turn % 4 > 0))
                said = "-".join([kind, backend, name, holds.__name__, *map(label, case)])
                yield pytest.param(row, holds, case, id=said, marks=marks)


# --- reading ---


@asked(fast=True)
def scores_are_verified(row):
    here, there = (tls.verify_scores(model) for model in row.both)
    assert there.index.equals(here.index)
    assert row.place.logits > 0 or there.equals(here)


@asked(lambda row, case: row.rotary or case[0] == "symmetric", case=CASES[:1] + CASES[2:3] + CASES[5:])
def ablated_heads_follow_explicit_operators(row, case):
    # In float32 rounding as on the CPU, 1e-6; TensorFloat-32, which is off by default, would cost 1e-3.
    allowed = 5e-6 if row.place.dtype == torch.float32 else row.place.logits
    assert worst_error(row.model, row.backend, row.name, case, zoo.prompt().to(row.place.device)) < allowed


@asked(fast=True, part=("antisymmetric", "rope_phase"))
def a_penalty_and_its_gradients_stay_on_the_device(row, part):
    if part not in row.parts:
        return
    gradients = []
    here, there = (tls.heads.qk_penalty(model, part) for model in row.both)
    for share, model in zip((here, there), row.both, strict=True):
        found = torch.autograd.grad(share, list(model.parameters()), allow_unused=True)
        gradients.append([gradient for gradient in found if gradient is not None])
    row.agree(here, there)
    row.gradients_agree(*gradients)


# --- hooks ---


def ablated(model, part, tokens, *, mask=None):
    rotary = part.name in rotary_parts
    heads = [
        (layer, head)
        for layer in range(model.cfg.n_layers)
        if not rotary or attention_view(model).rotary(layer) is not None
        for head in (1, 2)
    ]
    masked = {} if mask is None else {"attention_mask": on(model, mask)}
    with torch.no_grad(), tls.ablate(model, heads, part):
        return model(on(model, tokens), return_type="logits", **masked)


@asked()
def every_part_is_removed_on_the_device(row):
    tokens = zoo.prompt()
    for part in row.parts:
        here, there = (ablated(model, one_of_each(BLOCKS)[part], tokens) for model in row.both)
        row.agree(here, there, part)
        with torch.no_grad():
            assert not torch.equal(here, row.on_cpu(tokens, return_type="logits")), part


@asked(fast=True, replace=("mean", "resample"))
def outputs_are_replaced_on_the_device(row, replace):
    for reference in (None, zoo.prompt(3)):
        logits = []
        for model in row.both:
            part = tls.parts.Output(replace, None if reference is None else on(model, reference))
            with torch.no_grad(), tls.ablate(model, [(0, 1), (1, 2)], part):
                logits.append(model(on(model, zoo.prompt()), return_type="logits"))
        row.agree(*logits)


@asked(lambda row, what: row.of_stream, fast=True, what=("k",))
@asked(lambda row, what: row.of_stream, what=("q", "v"))
@pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
def edges_are_taken_out_on_the_device(row, what):
    for part in ("output", "symmetric"):
        logits = []
        for model in row.both:
            with torch.no_grad(), tls.ablate(model, "L0H1", part, into=f"L1H1.{what}"):
                logits.append(model(on(model, zoo.prompt()), return_type="logits"))
        row.agree(*logits, part)


@asked(lambda row: not row.delegated and not row.coarse_tables)
def bias_and_padding_on_the_device(row):
    tokens = torch.cat([torch.zeros(2, 3, dtype=torch.long), zoo.prompt(length=19)], 1)
    mask = (tokens != 0).long()
    biased = [tls.parts.Symmetric(include_bias=True)]
    if row.rotary:
        biased.append(tls.parts.RopePhase(include_bias=True))
    for part in biased:
        here, there = (ablated(model, part, tokens, mask=mask)[:, 3:] for model in row.both)
        row.agree(here, there, part.name)


@asked(lambda row: row.name != "gptj")
def gradients_flow_through_an_ablation_on_the_device(row):
    gradients = []
    for model in row.both:
        # Of the blocks: embedding and unembedding that are one tensor are two on the stand-in.
        parameters = [parameter for parameter in model.blocks.parameters() if parameter.requires_grad]
        with tls.ablate(model, [(1, 1)], "antisymmetric"):
            loss = model(on(model, zoo.prompt()), return_type="loss")
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients.append([gradient for gradient in found if gradient is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    row.gradients_agree(*gradients)


# --- tables ---


@asked()
def tables_are_those_of_the_cpu(row):
    extras = ("score_asym", "position_share") if row.name == "gpt2" else ("score_asym",)
    options = {"null_draws": 3, "extras": extras if row.name in ("gpt2", "llama") else ()}
    tables = [tls.analyze_heads(model, **options) for model in row.both]
    of_runs = ("prev", "dup", "ind", "outside", "score")
    scored = [name for name in tables[0] if name.split("_")[0] in of_runs]
    row.tables_agree(*(table.drop(columns=scored) for table in tables), of_weights=True)
    row.tables_agree(*(table[scored] for table in tables))
    assert tables[1].attrs["weights_sha256"]
    if row.coarse_tables:
        with pytest.raises(ScoreMismatch, match="rotates its pairs by other angles"):
            tls.detect_heads(row.model, n_sequences=4, null_draws=2)
    draws = 0 if row.coarse_tables else 2
    row.tables_agree(*(tls.detect_heads(model, n_sequences=4, null_draws=draws) for model in row.both))
    row.tables_agree(*(tls.heads.copying_scores(model) for model in row.both), of_weights=True)
    row.tables_agree(*(tls.k_composition(model, (1, 1)) for model in row.both), of_weights=True)
    if "scores" in row.view.hook_names(0):
        row.tables_agree(*(tls.relative_position_kernel(model, [(0, 1), (1, 0)]) for model in row.both))
    if row.rotary:
        row.tables_agree(*(tls.frequency_table(model) for model in row.both), of_weights=True)
    if row.place.dtype == torch.float32 and row.of_stream:  # its rows are sorted by size
        options = {"prompt": zoo.prompt(1, 12), "head": "L1H1", "query": -1, "key": 8, "remove": 3}
        row.tables_agree(*(tls.qk_attribution(model, **options) for model in row.both))
        options = {"prompt": zoo.prompt(1, 12), "heads": "L1", "query": -1, "direction": (5, 9), "by": "source"}
        terms = ["head", "source", "position"]
        row.tables_agree(*(tls.ov_attribution(model, **options).sort_values(terms) for model in row.both))


@asked(lambda row: row.name in ("llama", "gptj"))
def sweeps_are_those_of_the_cpu(row):
    drawn, text = (
        repeated_sequences(attention_view(row.on_cpu), n_sequences=3, segment_length=6, seed=1),
        zoo.prompt(3, 12),
    )
    text[0, :4] = 0
    mask = (text != 0).long()
    heads = [(0, 1), (1, 0), (1, 3)]

    def induction(model):
        return tls.tasks.induction(on(model, drawn))

    def language(model):
        return tls.tasks.language(on(model, text), attention_mask=on(model, mask))

    for part in row.parts:
        if part in ("rotary_band", "mode", "long_range", *block_parts):
            continue
        ways = [
            (induction, {"control": None if part == "output" else "random"}),
            (induction, {"screen": "gradient"}),
            (language, {}),
        ]
        # What is removed and how its effect is found do not know of each other: all ways with one part.
        for task, options in ways if part == "symmetric" else ways[:2] if part == "rope_phase" else ways[:1]:
            here, there = (
                tls.ablation_sweep(model, part, heads=heads, task=task(model), **options) for model in row.both
            )
            if "estimate" in here:
                # A gradient: autograd adds its terms in another order, which moves it by 3e-6 of its size.
                one, other = here.pop("estimate"), there.pop("estimate")
                np.testing.assert_allclose(other, one, rtol=0, atol=max(1e-4, row.place.gradients) * one.abs().max())
            row.tables_agree(here, there)
    row.tables_agree(*(band_effects(model, heads[:2], task=induction(model), draws=2) for model in row.both))
    mode, drawn_too = tls.parts.Mode(0), {"heads": heads[:2], "control": "random"}
    row.tables_agree(*(tls.ablation_sweep(model, mode, task=induction(model), **drawn_too) for model in row.both))
    output = tls.parts.Output
    for part in (tls.parts.LongRange(3, sinks=1), output("mean"), output("resample", zoo.prompt(4, 13))):
        row.tables_agree(*(tls.ablation_sweep(model, part, task=induction(model)) for model in row.both))
    here, there = (tls.tasks.induction_loss(model, n_sequences=4).value for model in row.both)
    assert there == pytest.approx(here, abs=row.place.logits)


# --- positional scores ---


@asked(lambda row, mode: row.name not in zoo.ENCODERS, fast=True, mode=("key",))
@asked(lambda row, mode: row.name not in zoo.ENCODERS, mode=("prompt",))
def positional_scores_are_those_of_the_cpu(row, mode):
    options = {"mode": mode, "per_frequency": row.rotary, "swaps": "all"}
    row.tables_agree(*(tls.positional_symbolic(model, block_prompt(), **options) for model in row.both))
    if row.name in ("yarn", "bloom"):
        options = {"mode": mode, "swaps": [(1, 3)], "frequencies": [0, 1] if row.rotary else None}
        row.tables_agree(*(attention_traces(model, block_prompt(), [(0, 1), (1, 2)], **options) for model in row.both))
        if row.rotary:
            row.tables_agree(*(frequency_norms(model, block_prompt(), [(0, 1), (1, 2)]) for model in row.both))


# --- spectral models ---


@asked(lambda row, log_omega: row.name in ("llama", "qwen3"), log_omega=(False, True))
def spectral_models_learn_on_the_device(row, log_omega, tmp_path):
    logits, losses, gradients, tables = [], [], [], []
    for base in row.both:
        spectral = move(to_spectral(base, log_omega=log_omega))
        parameters = list(spectral.spectral_parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        tokens = on(spectral, zoo.prompt())
        with torch.no_grad(), tls.ablate(spectral, [(0, 1), (1, 2)], "rope_phase"):
            logits.append(spectral(tokens, return_type="logits"))
        tables.append(tls.analyze_heads(spectral, null_draws=2, detectors=False))
        losses.append(spectral(tokens, return_type="loss"))
        losses[-1].backward(inputs=parameters)
        gradients.append([parameter.grad for parameter in parameters])
        optimizer.step()
        save_spectral(spectral, tmp_path / "spectral.safetensors")
        again = load_spectral(base, tmp_path / "spectral.safetensors")
        assert torch.equal(again(tokens, return_type="logits"), spectral(tokens, return_type="logits"))
    row.agree(*logits)
    row.agree(*losses)
    row.gradients_agree(*gradients)
    # A card rounds the exponential of the shift otherwise than the CPU does, by 6e-8 of a frequency.
    exact = row.place.dtype == torch.float32 and (row.place.logits == 0 or not log_omega)
    row.tables_agree(*tables, of_weights=exact)


@asked(lambda row: (row.backend, row.name) == ("bridge", "llama"))
def gain_and_phase_are_merged_on_the_device(row):
    merged = [merge(move(to_spectral(base), only=("gain", "phase"))) for base in row.both]
    here, there = (dict(model.named_parameters()) for model in merged)
    for name in here:
        row.agree(here[name], there[name], name)
