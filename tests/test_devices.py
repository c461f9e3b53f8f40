"""A model on a device other than the CPU: every path runs there and gives the numbers of the CPU.

The device is the stand-in of `stand_in_device.py`, with float64 and without, as no accelerator is at hand. Probes and
self-checks run too. Left out, as the stand-in cannot show them: reading a model's files onto a device (`load_model`
builds on the CPU and moves, as `on_device` does here), worker processes, generation with a key/value cache, and what
a real device does beside placing tensors: its rounding, its memory, its streams.
"""

import functools
import zlib

import pandas as pd
import pytest
import torch
import zoo
from attention_models import skip_unless_sampled
from positional_measurements import block_prompt
from spectral_zoo import move
from stand_in_device import DEVICE, SECOND_DEVICE, StandInDevice, WrongDevice

import tlspectral as tls
from tlspectral.ablation.bands import band_effects
from tlspectral.detectors import repeated_sequences
from tlspectral.models.attention import attention_view
from tlspectral.selection import BLOCK_PARTS
from tlspectral.spectral_rope import load_spectral, merge, save_spectral, to_spectral
from tlspectral.studies.positional_symbolic.traces import attention_traces, frequency_norms

# Grouped keys; query/key norm per head and over heads; softcap and windows; ALiBi; attention that is delegated, with
# local windows; a quarter of the columns rotated; rope in some layers; learned positions; the other backend.
OTHERS = ("gemma2", "gptneo", "bloom", "qwen3", "olmo2", "gemma3", "gptj", "neox", "smollm3", "mistral", "gpt2", "opt")
on_line_3 = [zoo.needs_hooked, pytest.mark.slow]
# With float64 the same code runs as without, but on the device: one model for each way of computing in float64.
WITH_FLOAT64 = ("llama", "gemma2", "qwen3", "bloom", "gptj", "gpt2", "olmo2")


def model_cases():
    for backend, name, marks in [
        ("bridge", "llama", []),
        *(("bridge", name, [pytest.mark.slow]) for name in OTHERS),
        *(("hooked", name, on_line_3) for name in ("llama", "gpt2", "qwen3", "bloom")),
    ]:
        for float64 in (True, False) if backend == "bridge" and name in WITH_FLOAT64 else (False,):
            kind = "with_float64" if float64 else "without_float64"
            yield pytest.param(backend, name, float64, marks=marks, id=f"{kind}-{backend}-{name}")


every_model = pytest.mark.parametrize(("backend", "name", "device"), list(model_cases()), indirect=["device"])


@pytest.fixture
def half(request, full):
    """Of slow cases, take a model that has two kinds of float64 with one; one of line 3 in half of the tests."""
    given, case = request.node.callspec.params, zlib.crc32(request.function.__name__.encode())
    backend, name = given.get("backend", "bridge"), given["name"]
    whole = request.node.get_closest_marker("slow") is None or (backend == "bridge" and name not in WITH_FLOAT64)
    skip_unless_sampled(full or whole, (backend, name), case + given["device"] + given.get("log_omega", 0), of=2)


halved = pytest.mark.usefixtures("half")
NO_ROPE = ("gpt2", "opt", "gptneo", "bloom")
BLOCKS = block_prompt((2, 2, 2), prefix=16, suffix=2)  # inside the zoo's window of 8
quiet = {"show_progress": False}


@functools.cache
def on_device(backend, name):
    with StandInDevice(float64=False):
        return getattr(zoo, backend)(name).to(DEVICE)


def parts_of(name):
    """Parts that every layer of the model has: without rotary positions, what blocks add to a score is content."""
    missing = {"rope_phase", "rotary_band", "interaction"} | (set() if name == "bloom" else {"position"})
    return [part for part in tls.hooks.PARTS if name not in NO_ROPE or part not in missing]


def ablated(model, part, tokens, *, bias=False, mask=None):
    rotary = part in ("rope_phase", "rotary_band")
    heads = [
        (layer, head)
        for layer in range(model.cfg.n_layers)
        if not rotary or attention_view(model).rotary(layer) is not None
        for head in (1, 2)
    ]
    options = {"rotary_band": {"frequencies": [0, 1]}, "long_range": {"window": 3, "sinks": 1}}.get(part, {})
    options |= {"blocks": BLOCKS} if part in BLOCK_PARTS else {}
    options |= {"include_bias": bias} if part not in ("output", "long_range", *BLOCK_PARTS) else {}
    masked = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad(), tls.ablate(model, heads, part, **options):
        return model(tokens, return_type="logits", **masked)


def same(first, second):
    """Tables of the CPU and of the device: rounding of LAPACK by the alignment of memory, at most 2e-13 here."""
    pd.testing.assert_frame_equal(first, second, rtol=1e-9, atol=1e-9, check_exact=False)


def same_gradients(first, second):
    """Autograd may add terms in another order: measured 3e-7 of a gradient's size. A term left out is a tenth of it."""
    for one, other in zip(first, second, strict=True):
        assert float((one - other.cpu()).norm()) <= 1e-5 * float(one.norm())


# --- the stand-in ---


def test_the_stand_in_refuses_what_a_device_refuses():
    with StandInDevice(float64=False):
        x = torch.arange(3.0, device=DEVICE)
        assert x.device == torch.device(DEVICE)
        assert (x + 1).cpu().tolist() == [1, 2, 3] == (x + torch.tensor(1)).tolist()
        assert x[torch.tensor([2])].tolist() == [2]
        for wrong in (
            lambda: x + torch.ones(3),
            lambda: x + torch.ones(3, device=SECOND_DEVICE),
            lambda: x.index_select(0, torch.tensor([0])),
            lambda: torch.rand(3, generator=torch.Generator(), device=DEVICE),
            x.double,
            x.numpy,
            lambda: x.to("cpu", torch.float64),
            lambda: torch.zeros(3, dtype=torch.float64).to(DEVICE),
        ):
            with pytest.raises(WrongDevice):
                wrong()
        assert torch.equal(x.cpu().double(), torch.arange(3).double())
    with StandInDevice():
        weight = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        (weight.double() ** 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == torch.device(DEVICE)


# --- penalties ---


@halved
@every_model
def test_a_penalty_and_its_gradients_stay_on_the_device(backend, name, device):
    cpu, model = zoo.shared(backend, name), on_device(backend, name)
    for part in ("antisymmetric", "rope_phase"):
        if part not in parts_of(name):
            continue
        there, here = (tls.heads.qk_penalty(one, part) for one in (model, cpu))
        assert there.device == torch.device(device)
        assert torch.equal(there.cpu(), here)
        gradients = [
            [g for g in torch.autograd.grad(share, list(one.parameters()), allow_unused=True) if g is not None]
            for share, one in ((here, cpu), (there, model))
        ]
        assert all(gradient.device == torch.device(device) for gradient in gradients[1])
        same_gradients(*gradients)


# --- hooks ---


@halved
@every_model
def test_every_part_is_removed_on_the_device(backend, name, device):
    cpu, model, tokens = zoo.shared(backend, name), on_device(backend, name), zoo.prompt()
    for part in parts_of(name):
        on_cpu, there = (ablated(one, part, given) for one, given in ((cpu, tokens), (model, tokens.to(device))))
        assert there.device == torch.device(device)
        assert torch.equal(there.cpu(), on_cpu), part
        with torch.no_grad():
            assert not torch.equal(on_cpu, cpu(tokens, return_type="logits")), part


@pytest.mark.parametrize("replace", ["mean", "resample"])
def test_outputs_are_replaced_on_the_device(replace, device):
    logits = []
    for model in (zoo.shared("bridge", "llama"), on_device("bridge", "llama")):
        place = attention_view(model).device
        for reference in (None, zoo.prompt(3).to(place)):
            with torch.no_grad(), tls.ablate(model, [(0, 1), (1, 2)], "output", replace=replace, reference=reference):
                logits.append(model(zoo.prompt().to(place), return_type="logits").cpu())
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


@pytest.mark.filterwarnings("ignore:the .* cannot be edited alone")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj", "olmo2"])
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_edges_are_taken_out_on_the_device(name, what, device):
    tokens = zoo.prompt()
    for part in ("output", "symmetric"):
        logits = []
        for model in (zoo.shared("bridge", name), on_device("bridge", name)):
            place = attention_view(model).device
            with torch.no_grad(), tls.ablate(model, "L0H1", part, into="L1H1", input=what):
                logits.append(model(tokens.to(place), return_type="logits"))
        assert logits[1].device == torch.device(device)
        assert torch.equal(logits[0], logits[1].cpu()), part


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), [("bridge", "neox"), ("bridge", "llama")])
def test_bias_and_padding_on_the_device(backend, name, device):
    cpu, model = zoo.shared(backend, name), on_device(backend, name)
    tokens = torch.cat([torch.zeros(2, 3, dtype=torch.long), zoo.prompt(length=19)], 1)
    mask = (tokens != 0).long()
    for part in ("rope_phase", "rotary_band", "symmetric"):
        there = ablated(model, part, tokens.to(device), bias=True, mask=mask.to(device))
        assert torch.equal(there.cpu(), ablated(cpu, part, tokens, bias=True, mask=mask)), part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "gptj"])
def test_gradients_flow_through_an_ablation_on_the_device(name, device):
    gradients = []
    for model in (zoo.bridge(name), zoo.bridge(name).to(device)):
        with tls.ablate(model, [(1, 1)], "antisymmetric"):
            model(zoo.prompt().to(attention_view(model).device), return_type="loss").backward()
        gradients.append([parameter.grad for _, parameter in model.named_parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    same_gradients(*gradients)


# --- tables ---


@halved
@pytest.mark.slow
@every_model
def test_tables_are_those_of_the_cpu(backend, name, device):
    cpu, model = zoo.shared(backend, name), on_device(backend, name)
    extras = ("score_asym", "position_share") if name == "gpt2" else ("score_asym",)
    options = {"null_draws": 3, "extras": extras if name in ("gpt2", "llama") else (), **quiet}
    same(tls.analyze_heads(cpu, **options), tls.analyze_heads(model, **options))
    same(*(tls.detect_heads(one, n_sequences=4, null_draws=2) for one in (cpu, model)))
    same(tls.heads.copying_scores(cpu), tls.heads.copying_scores(model))
    same(tls.k_composition(cpu, (1, 1)), tls.k_composition(model, (1, 1)))
    assert tls.verify_scores(cpu).equals(tls.verify_scores(model))
    assert tls.analyze_heads(model, **options).attrs["weights_sha256"]
    if "scores" in attention_view(cpu).hook_names(0):
        kernels = (tls.relative_position_kernel(one, [(0, 1), (1, 0)]) for one in (cpu, model))
        same(*kernels)
    options = {"prompt": zoo.prompt(1, 12), "head": "L1H1", "query": -1, "key": 8, "remove": 3}
    same(tls.qk_attribution(cpu, **options), tls.qk_attribution(model, **options))
    if name not in NO_ROPE:
        same(tls.frequency_table(cpu), tls.frequency_table(model))


@halved
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma2"])
def test_sweeps_are_those_of_the_cpu(name, device):
    cpu, model = zoo.shared("bridge", name), on_device("bridge", name)
    induction = repeated_sequences(attention_view(cpu), 3, 6, seed=1)
    text = zoo.prompt(3, 12)
    text[0, :4] = 0
    mask = (text != 0).long()
    heads = [(0, 1), (1, 0), (1, 3)]
    for part in parts_of(name):
        if part in ("rotary_band", "long_range", *BLOCK_PARTS):
            continue
        ways = [
            {"tokens": induction, "control": None if part == "output" else "random"},
            {"tokens": induction, "screen": "gradient"},
            {"task": "language", "tokens": text, "attention_mask": mask},
        ]
        # What is removed and how its effect is found do not know of each other: all ways with one part.
        for options in ways if part == "symmetric" else ways[:2] if part == "rope_phase" else ways[:1]:
            first, second = (
                tls.ablation_sweep(one, part, heads=heads, **given, **quiet)
                for one, given in ((cpu, options), (model, {k: _moved(v, device) for k, v in options.items()}))
            )
            if "estimate" in first:
                # A gradient: autograd adds its terms in another order, which moves it by 3e-6 of its size.
                pd.testing.assert_series_equal(first.pop("estimate"), second.pop("estimate"), rtol=1e-4)
            same(first, second)
    same(*(band_effects(one, heads[:2], tokens=induction, draws=2, **quiet) for one in (cpu, model)))
    for part, options in (
        ("long_range", {"window": 3, "sinks": 1}),
        ("output", {"replace": "mean"}),
        ("output", {"replace": "resample", "reference": zoo.prompt(4, 13)}),
    ):
        same(*(tls.ablation_sweep(one, part, tokens=induction, **options, **quiet) for one in (cpu, model)))
    assert tls.tasks.induction_loss(cpu, n_sequences=4).value == tls.tasks.induction_loss(model, n_sequences=4).value


def _moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


# --- positional scores ---


@halved
@every_model
def test_positional_scores_are_those_of_the_cpu(backend, name, device):
    cpu, model = zoo.shared(backend, name), on_device(backend, name)
    for mode in ("prompt", "key"):
        options = {"mode": mode, "per_frequency": name not in NO_ROPE, "exclude_first_block": False, **quiet}
        same(*(tls.positional_symbolic(one, block_prompt(), **options) for one in (cpu, model)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "bloom"])
def test_traces_are_those_of_the_cpu(name, device):
    cpu, model = zoo.shared("bridge", name), on_device("bridge", name)
    for mode in ("prompt", "key"):
        options = {"mode": mode, "swaps": [(1, 3)], "frequencies": None if name == "bloom" else [0, 1]}
        same(*(attention_traces(one, block_prompt(), [(0, 1), (1, 2)], **options) for one in (cpu, model)))
    if name != "bloom":
        same(*(frequency_norms(one, block_prompt(), [(0, 1), (1, 2)]) for one in (cpu, model)))


# --- spectral models ---


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("bridge", "llama"),
        pytest.param("bridge", "qwen3", marks=pytest.mark.slow),
        pytest.param("hooked", "llama", marks=on_line_3),
    ],
)
@halved
@pytest.mark.parametrize("log_omega", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_spectral_models_learn_on_the_device(backend, name, log_omega, device, tmp_path):
    runs, gradients, tables = [], [], []
    for base in (zoo.shared(backend, name), on_device(backend, name)):
        spectral = move(to_spectral(base, log_omega=log_omega))
        parameters = list(spectral.spectral_parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        tokens = zoo.prompt().to(attention_view(spectral).device)
        with torch.no_grad(), tls.ablate(spectral, [(0, 1), (1, 2)], "rope_phase"):
            runs.append([spectral(tokens, return_type="logits")])
        tables.append(tls.analyze_heads(spectral, null_draws=2, detectors=False, **quiet))
        loss = spectral(tokens, return_type="loss")
        loss.backward(inputs=parameters)
        runs[-1].append(loss)
        gradients.append([parameter.grad for parameter in parameters])
        optimizer.step()
        save_spectral(spectral, tmp_path / "spectral.safetensors")
        again = load_spectral(base, tmp_path / "spectral.safetensors")
        assert torch.equal(again(tokens, return_type="logits"), spectral(tokens, return_type="logits"))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(*runs, strict=True))
    same_gradients(*gradients)
    same(*tables)


@pytest.mark.slow
def test_gain_and_phase_are_merged_on_the_device(device):
    merged = [
        merge(move(to_spectral(base), only=("gain", "phase")))
        for base in (zoo.shared("bridge", "llama"), on_device("bridge", "llama"))
    ]
    here, there = (dict(model.named_parameters()) for model in merged)
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)


@pytest.mark.slow
@zoo.needs_hooked
def test_the_spectral_hooked_transformer_learns_on_the_device(device):
    from test_spectral_hooked import config

    models = [tls.SpectralHookedTransformer(config()), tls.SpectralHookedTransformer(config()).to(device)]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(zoo.prompt().to(attention_view(model).device), return_type="loss").backward()
        optimizer.step()
    same_gradients(*([parameter.grad for parameter in model.parameters()] for model in models))
