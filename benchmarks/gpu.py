"""The main calls on one card: the same numbers as the CPU, and seconds and memory at the sizes of real models.

Run `python benchmarks/gpu.py --minutes 8 -o FOLDER` on the card, with `tests/` and `studies/` of the clone beside it;
`--device cpu --tiny` is a rehearsal in which every step runs and nothing is large. Models are random, made on the
device. A step writes a line of JSON to FOLDER/gpu.jsonl when it is over, so that a run that is cut off has said what it
measured. A step that fails says its error, and the next one goes on; none begins when time is over.

Beside the seconds of a sweep stands its limit: what its arithmetic takes at the rate that a pass of 16 x 129 tokens
reaches in the same run. The arithmetic is two operations for each token and weight of the blocks behind the head.
"""

import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1")

import numpy as np
import pandas as pd
import torch
import transformers
import typer

import tlspectral as tls

ROOT = Path(__file__).parents[1]
CONFORMANCE_SHARE = 0.25
SWEEP = (16, 129)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, and the type that it is measured in."""

    layers: int
    d_model: int
    heads: int
    groups: int
    d_mlp: int
    vocabulary: int
    dtype: torch.dtype

    def model(self, device: str, seed: int = 0, enlarged: float = 4) -> Any:
        """Make it, random; norms are jittered and queries and keys enlarged, as else every score is near 0."""
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.d_model,
            intermediate_size=self.d_mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        torch.manual_seed(seed)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(device):
                model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif "q_proj" in name or "k_proj" in name:
                    parameter.mul_(enlarged)
        return model

    @property
    def block(self) -> float:
        """Operations of one block for one token."""
        attention = self.d_model * self.d_model * (2 + 2 * self.groups / self.heads)
        return 2 * (attention + 3 * self.d_model * self.d_mlp)

    @property
    def unembedding(self) -> float:
        """Operations of the logits at one position."""
        return 2 * self.d_model * self.vocabulary

    def sweep_in_passes(self, rows: int, tokens: int, scored: int) -> float:
        """Return the arithmetic of a sweep of all heads, in passes over `SWEEP` tokens: the blocks behind each head."""
        blocks = self.heads * self.layers * (self.layers + 1) / 2
        sweep = rows * (tokens * self.block * blocks + scored * self.unembedding * self.heads * self.layers)
        return sweep / (SWEEP[0] * SWEEP[1] * (self.block * self.layers + self.unembedding))


SMALL = (4, 256, 8, 2, 512, 512)
SHAPES = {
    "SmolLM2-135M": Shape(30, 576, 9, 3, 1536, 49152, torch.float32),
    "Llama-3-8B": Shape(32, 4096, 32, 8, 14336, 128256, torch.bfloat16),
}
TINY = {
    "SmolLM2-135M": Shape(3, 64, 4, 2, 128, 300, torch.float32),
    "Llama-3-8B": Shape(4, 64, 4, 2, 128, 300, torch.bfloat16),
}


@dataclass
class Run:
    """Where steps run, until when, and where what they measured is written."""

    device: str
    end: float
    log: TextIO
    began: float = field(default_factory=time.time)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def on_card(self) -> bool:
        """Whether steps run on a card, where memory is counted."""
        return self.device.startswith("cuda")

    def note(self, step: str, **found: Any) -> None:
        """Print and write a line of JSON."""
        line = json.dumps({"step": step, **found}, default=str)
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.time()

    def step(self, name: str, call: Callable[[], Any], **said: Any) -> Any:
        """Return the result of a call, and note its seconds and peak memory; None where it fails or time is over."""
        if self.left() < 0:
            self.note(name, skipped="time is over")
            return None
        if self.on_card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.time()
        try:
            made = call()
        except Exception as error:  # the next step goes on
            last = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(last.filename).name}:{last.lineno}"
            self.note(name, failed=f"{type(error).__name__}: {error}"[:400], at=at)
            return None
        if self.on_card:
            torch.cuda.synchronize()
            said["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.seconds[name] = time.time() - began
        self.note(name, seconds=round(self.seconds[name], 3), **said)
        return made

    def step_or_estimate(self, name: str, expected: float, call: Callable[[], Any], **said: Any) -> None:
        """Run a step if the seconds that it is expected to take are left; else note these."""
        if expected < self.left():
            self.step(name, call, **said)
        else:
            self.note(name, extrapolated=round(expected, 1), **said)


def pairs(rows: torch.Tensor, vocabulary: int) -> dict[str, Any]:
    """Return answers, and prompts that differ at one token, for some random prompts."""
    other = rows.clone()
    other[:, 4] = (other[:, 4] + 11) % (vocabulary - 20) + 5
    n = len(rows)
    return {"correct": list(range(20, 20 + n)), "wrong": list(range(40, 40 + n)), "counterfactual": other}


def differences(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, str]:
    """Return the largest difference of each column of numbers, beside the column's size."""
    found = {}
    for column in a.columns.intersection(b.columns):
        if pd.api.types.is_float_dtype(a[column]) and a[column].notna().any():
            x, y = a[column].to_numpy(), b[column].to_numpy()
            size = np.nanmax(np.abs(x))
            off = np.nanmax(np.abs(x - y)) if np.array_equal(np.isnan(x), np.isnan(y)) else np.inf
            if off > 1e-6 * max(size, 1e-12):
                found[column] = f"{off:.1e} of {size:.1e}"
    return found


def main_calls(run: Run, model: Any, rows: torch.Tensor, called: str) -> dict[str, pd.DataFrame | None]:
    """Return the tables of the main calls on a small model."""
    answers = pairs(rows, SMALL[-1])
    paired = tls.logit_difference(rows, **answers)
    task = tls.logit_difference(rows, answers["correct"], answers["wrong"])
    calls: dict[str, Callable[[], Any]] = {
        "analyze_heads": lambda: tls.analyze_heads(model, null_draws=20),
        "detect_heads": lambda: tls.detect_heads(model, n_sequences=16, segment_length=32),
        "k_composition": lambda: tls.k_composition(model, "L3H1.k"),
        "kernel": lambda: tls.relative_position_kernel(model, prompts=rows),
        "edge_effects": lambda: tls.edge_effects(model, task=paired, screen="gradient", method="EAP"),
        "run_circuit": lambda: pd.DataFrame({"value": [tls.run_circuit(model, [("L0H1", "L2H3.q")], paired).value]}),
        "qk_attribution": lambda: tls.qk_attribution(model, rows[0], "L2H1", 12, 5),
    }
    for part in ("output", "rope_phase", "M_S", "M_A"):
        calls[f"sweep of {part}"] = lambda part=part: tls.ablation_sweep(model, part, task=task)
    return {name: run.step(f"{name} {called}", call) for name, call in calls.items()}


def same_numbers(run: Run) -> None:
    """Compare the tables of a small model on the card with those of the CPU, in both types."""
    rows = torch.randint(5, 500, (6, 17), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        tables = []
        for device in ("cpu", run.device):
            made = Shape(*SMALL, dtype).model("cpu").to(device)
            model = run.step(f"load_model {dtype} {device}", lambda made=made: tls.load_model(made))
            tables.append({} if model is None else main_calls(run, model, rows, f"{dtype} {device}"))
        for name, table in tables[0].items():
            there = tables[1].get(name)
            if table is None or there is None:
                continue
            keys = [one for one in ("layer", "head", "sender", "receiver", "offset") if one in table]
            a, b = (one.sort_values(keys, ignore_index=True) if keys else one for one in (table, there))
            differ: Any = differences(a, b) if len(a) == len(b) else f"{len(a)} and {len(b)} rows"
            run.note(f"same numbers: {name} {dtype}", differ=differ)


def tensor_float_32(run: Run) -> None:
    """Note what the check of scores says of a small model whose products have 10 bits."""
    if not run.on_card:
        run.note("TensorFloat-32", skipped="a card has it")
        return
    made = Shape(*SMALL, torch.float32).model("cpu").to(run.device)
    model = tls.load_model(made)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        said = str(run.step("TensorFloat-32: verify_scores", lambda: tls.verify_scores(model)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    run.note("TensorFloat-32", said=said[:300])


def profiled(run: Run, name: str, call: Callable[[], Any], rows: int = 14) -> None:
    """Run a step under the profiler, and note the package's functions in which it spent most, with what they call."""
    profile = cProfile.Profile()
    run.step(name, lambda: profile.runcall(call))
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    ours = [
        (spent[3], Path(at[0]).name, at[2]) for at, spent in stats.items() if f"{os.sep}tlspectral{os.sep}" in at[0]
    ]
    run.note(
        f"{name}: where", cumulative=[f"{s:.2f} {file}:{function}" for s, file, function in sorted(ours)[:-rows:-1]]
    )


def batch_rounding(run: Run, name: str, shape: Shape) -> None:
    """Note how far logits of a prompt differ when another one is run beside it, by type and size of q and k."""
    rows = torch.randint(5, shape.vocabulary - 5, (2, 15), generator=torch.Generator().manual_seed(1)).to(run.device)
    for dtype, enlarged in ((torch.bfloat16, 1), (torch.bfloat16, 4), (torch.float32, 4)):
        model = replace(shape, dtype=dtype).model(run.device, enlarged=enlarged)
        with torch.no_grad():
            alone, beside = model(rows[:1]).logits[0, -1].float(), model(rows).logits[0, -1].float()
        found = {"differ": float((alone - beside).abs().max()), "largest": float(beside.abs().max())}
        run.note(f"{name}: a prompt alone and beside another, {dtype}, q and k x {enlarged}", **found)
        del model


def conformance(run: Run) -> None:
    """Run rows of the conformance suite on the card until their share of the time is over, and count them."""
    limit = min(run.left(), CONFORMANCE_SHARE * (run.end - run.began))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "studies"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/test_conformance_devices.py"]
    command += ["--device", run.device, "-m", "slow or not slow", "-k", "on_the_device and float32"]
    log = Path(run.log.name).with_name("conformance.log")
    with log.open("w") as said, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            cwd=ROOT,
            stdout=said,
            stderr=said,
            timeout=limit,
            env=os.environ | {"PYTHONPATH": paths},
            check=False,
        )
    lines = log.read_text().splitlines()
    failed = [line.split(" - ")[0].split("::")[-1] for line in lines if " FAILED" in line]
    run.note(
        "conformance, float32",
        passed=sum(" PASSED" in line for line in lines),
        failed=failed,
        seconds=round(limit),
        last=lines[-1:],
    )


def at_size(run: Run, name: str, shape: Shape) -> None:
    """Measure the main calls on a random model of a real one's size."""
    made = run.step(f"{name}: make", lambda: shape.model(run.device), dtype=str(shape.dtype))
    model = None if made is None else run.step(f"{name}: load_model", lambda: tls.load_model(made))
    if model is None:
        return
    drawn = torch.Generator().manual_seed(1)
    rows = torch.randint(5, shape.vocabulary - 5, (16, 15), generator=drawn)
    answers = pairs(rows, shape.vocabulary)
    right, wrong = answers["correct"], answers["wrong"]
    one = tls.logit_difference(rows[:1], right[:1], wrong[:1])
    few = tls.logit_difference(rows[:4], right[:4], wrong[:4], counterfactual=answers["counterfactual"][:4])
    ids = torch.randint(5, shape.vocabulary - 5, SWEEP, generator=drawn).to(run.device)
    middle = f"L{shape.layers // 2}"
    a_pass, a_layer = f"{name}: a pass of 16 x 129 tokens", f"{name}: analyze_heads of a layer, weights only, 100 draws"
    detectors, a_sweep = (
        f"{name}: detect_heads, 25 sequences",
        f"{name}: sweep of a middle layer's outputs, 16 x 129 tokens",
    )
    with torch.no_grad():
        run.step(f"{name}: a first pass of 16 x 129 tokens", lambda: model(ids, return_type=None))
        run.step(a_pass, lambda: model(ids, return_type=None))
    profiled(run, a_layer, lambda: tls.analyze_heads(model, heads="L1", detectors=False))
    run.step(detectors, lambda: tls.detect_heads(model, n_sequences=25))
    one_limit = run.seconds.get(a_pass, float("nan")) * shape.sweep_in_passes(1, rows.shape[1], 1)
    for when in ("first", "again"):
        run.step(
            f"{name}: sweep of all outputs, one prompt, {when}",
            lambda: tls.ablation_sweep(model, "output", task=one),
            limit=round(one_limit, 2),
        )
    profiled(
        run,
        f"{name}: sweep of one head, one prompt",
        lambda: tls.ablation_sweep(model, "output", heads=f"{middle}H0", task=one),
    )
    run.step(f"{name}: top_pairs, 16 x 129 tokens", lambda: tls.top_pairs(model, prompts=ids))
    edges = run.step(
        f"{name}: EAP of all edges, 4 pairs, 100 exact",
        lambda: tls.edge_effects(model, task=few, screen="gradient", method="EAP"),
    )
    if edges is not None:
        chosen = edges.head(max(1, len(edges) // 100))
        for when in ("first", "again"):
            run.step(
                f"{name}: a circuit of 1 % of the edges, 4 pairs, {when}", lambda: tls.run_circuit(model, chosen, few)
            )
    run.step(a_sweep, lambda: tls.ablation_sweep(model, "output", heads=middle))
    if a_sweep in run.seconds and a_pass in run.seconds:
        run.step_or_estimate(
            f"{name}: sweep of all outputs, 16 x 129 tokens",
            shape.layers * run.seconds[a_sweep],
            lambda: tls.ablation_sweep(model, "output"),
            limit=round(run.seconds[a_pass] * shape.sweep_in_passes(*SWEEP, SWEEP[1]), 1),
        )
    if a_layer in run.seconds and detectors in run.seconds:
        run.step_or_estimate(
            f"{name}: analyze_heads of all layers",
            shape.layers * run.seconds[a_layer] + run.seconds[detectors],
            lambda: tls.analyze_heads(model),
        )


def main(
    minutes: Annotated[float, typer.Option(help="No step begins later.")] = 8,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of gpu.jsonl.")] = Path("out/gpu"),
    device: Annotated[str, typer.Option(help="The card, as cuda or cuda:1.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small models: a rehearsal.")] = False,
) -> None:
    """Run every step, and print and write what each of them measured."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "gpu.jsonl").open("a") as log:
        run = Run(device, time.time() + 60 * minutes, log)
        run.note(
            "machine",
            date=time.strftime("%Y-%m-%d"),
            device=torch.cuda.get_device_name() if run.on_card else device,
            torch=torch.__version__,
            transformers=transformers.__version__,
            tlspectral=tls.__version__,
        )
        same_numbers(run)
        tensor_float_32(run)
        conformance(run)
        for name, shape in (TINY if tiny else SHAPES).items():
            at_size(run, name, shape)
            if run.on_card:
                torch.cuda.empty_cache()
        if run.left() > 0:
            batch_rounding(run, name, shape)
        run.note("done", seconds_left=round(run.left(), 1))


if __name__ == "__main__":
    typer.run(main)
