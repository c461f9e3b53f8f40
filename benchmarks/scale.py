"""Cost of head tables of models too large to load: CPU seconds, peak memory, and how both grow.

Run `python benchmarks/scale.py` (about half an hour of one idle core, 4 GiB of disk; `--small` for a smoke run of a
minute). Weights are random values of the right shapes, written to a temporary folder in safetensors, and each table is
made in a process of its own on one thread: CPU seconds and peak resident memory (mapped pages of files included) are
that process's, with its imports; a head's share is without them. The comparison is bare LAPACK: `eigvals` of as many
d_head x d_head matrices as the null draws. "No null" is a null of two draws, the least that a table takes. Only the
tensors that a streamed table reads are written.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

NO_NULL = 2  # draws; fewer have no spread


@dataclass(frozen=True)
class Shape:
    """A model's attention: Llama's, or OLMo 2's with a query/key norm over all heads and no norm in front."""

    name: str
    d_model: int
    d_head: int
    heads: int
    kv_heads: int
    layers: int
    draws: tuple[int, ...]
    model_type: str = "llama"


# Attention of models that people ask for, one layer each, with the number of layers and of parameters (1e9).
NAMES: dict[Shape, tuple[int, float]] = {
    Shape("gpt2", 768, 64, 12, 12, layers=1, draws=(100,)): (12, 0.124),
    Shape("Qwen3-0.6B", 1024, 128, 16, 8, layers=1, draws=(100,)): (28, 0.6),
    Shape("Llama-3.2-1B", 2048, 64, 32, 8, layers=1, draws=(100,)): (16, 1.24),
    Shape("pythia-1.4b", 2048, 128, 16, 16, layers=1, draws=(100,)): (24, 1.41),
    Shape("gemma-2-2b", 2304, 256, 8, 4, layers=1, draws=(100,)): (26, 2.61),
    Shape("Phi-3-mini", 3072, 96, 32, 32, layers=1, draws=(100,)): (32, 3.82),
    Shape("Mistral-7B", 4096, 128, 32, 8, layers=1, draws=(100,)): (32, 7.25),
    Shape("OLMo-2-7B", 4096, 128, 32, 32, layers=1, draws=(100,), model_type="olmo2"): (32, 7.3),
    Shape("Qwen2.5-7B", 3584, 128, 28, 4, layers=1, draws=(100,)): (28, 7.62),
    Shape("Llama-3-8B", 4096, 128, 32, 8, layers=1, draws=(100,)): (32, 8.03),
}
LLAMA_8B = Shape("Llama-3-8B", 4096, 128, 32, 8, layers=32, draws=(NO_NULL, 100, 300))
LLAMA_405B = Shape("one layer of Llama-3.1-405B", 16384, 128, 128, 8, layers=1, draws=(NO_NULL,))
OLMO2_7B = Shape("two layers of OLMo-2-7B", 4096, 128, 32, 32, layers=2, draws=(NO_NULL,), model_type="olmo2")
GROWING_LAYERS = tuple(Shape(f"{n} layers", 2048, 64, 32, 8, layers=n, draws=(NO_NULL,)) for n in (2, 4, 8, 16, 32))
GROWING_WIDTH = tuple(
    Shape(f"width {d}", d, 64, 16, 4, layers=2, draws=(NO_NULL, 102)) for d in (1024, 2048, 4096, 8192)
)
SMALL = Shape("small", 256, 32, 8, 2, layers=4, draws=(NO_NULL, 20))
SMALL_LAYERS = tuple(Shape(f"{n} layers", 128, 32, 4, 2, layers=n, draws=(NO_NULL,)) for n in (1, 2))
SMALL_WIDTH = tuple(Shape(f"width {d}", d, 32, 4, 2, layers=1, draws=(NO_NULL, 22)) for d in (128, 256))


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """The attention of a model in bfloat16, a shard per layer, written one layer at a time."""
    from safetensors.torch import save_file

    config = {
        "model_type": shape.model_type,
        "architectures": [f"{shape.model_type.capitalize()}ForCausalLM"],
        "hidden_size": shape.d_model,
        "intermediate_size": 4 * shape.d_model,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.d_head,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shard_of = {}
    for layer in range(shape.layers):
        prefix, file = f"model.layers.{layer}", f"model-{layer:05d}.safetensors"
        tensors = {}
        if shape.model_type == "llama":
            tensors[f"{prefix}.input_layernorm.weight"] = torch.rand(shape.d_model, generator=generator) + 0.5
        for role, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            if shape.model_type == "olmo2":
                gain = torch.rand(heads * shape.d_head, generator=generator) + 0.5
                tensors[f"{prefix}.self_attn.{role}_norm.weight"] = gain
            weight = torch.randn(heads * shape.d_head, shape.d_model, generator=generator, dtype=torch.bfloat16)
            tensors[f"{prefix}.self_attn.{role}_proj.weight"] = weight.mul_(0.02)
        save_file(tensors, folder / file)
        shard_of |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))


def table(folder: Path, draws: int) -> dict[str, float]:
    """Cost of one table in this process, which has done nothing else."""
    torch.set_num_threads(1)
    import tlspectral
    from tlspectral.models.checkpoints.layers import opened_files

    checkpoint = opened_files(str(folder))
    if checkpoint is None:
        raise SystemExit(f"{folder} is not read from its files")
    with checkpoint.layer(0):  # loads TransformerLens and transformers
        pass
    imports = time.process_time()
    # The first layer of a process includes the setup of torch and LAPACK; it runs once before, uncounted.
    tlspectral.analyze_heads(folder, heads="L0", null_draws=NO_NULL, detectors=False)
    before = time.process_time()
    heads = tlspectral.analyze_heads(folder, null_draws=draws, detectors=False)
    seconds = time.process_time() - before
    return {
        "cpu": imports + seconds,
        "cpu_a_head": seconds / len(heads),
        "peak_mib": peak_memory(),
        "heads": len(heads),
        "eigvals": bare_eigvals(checkpoint.config.head_dim, draws),
    }


def bare_eigvals(d_head: int, draws: int, at_least: int = 50) -> float:
    """CPU seconds of `draws` eigenvalue problems of size d_head, extrapolated from `at_least` of them."""
    matrices = torch.randn(at_least, d_head, d_head, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.linalg.eigvals(matrices[:2])
    before = time.process_time()
    torch.linalg.eigvals(matrices)
    return (time.process_time() - before) * draws / at_least


def peak_memory() -> float:
    """Peak resident MiB of this process (Linux), mapped pages of files included."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measured(shape: Shape, folder: Path) -> list[dict[str, Any]]:
    """Costs of a shape's tables, each made in a process of its own."""
    checkpoint = folder / shape.name.replace(" ", "-")
    write_checkpoint(shape, checkpoint)
    rows = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for draws in shape.draws:
        command = [sys.executable, __file__, "--table", str(checkpoint), "--draws", str(draws)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(f"{shape.name}, {draws} draws: {process.stderr.strip()}")
        row = {**asdict(shape), "draws": draws, **json.loads(process.stdout.splitlines()[-1])}
        rows.append(row)
        print(line(row), flush=True)
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    draws = "no null" if row["draws"] == NO_NULL else f"{row['draws']} draws"
    return (
        f"{row['name']:28s} {row['d_model']:6d}/{row['d_head']:<4d} {row['heads']:5d} heads {draws:10s} "
        f"{row['cpu']:8.1f} CPU s  {1e3 * row['cpu_a_head']:8.1f} ms a head (bare eigvals {1e3 * row['eigvals']:7.1f})"
        f"  peak {row['peak_mib']:6.0f} MiB"
    )


def draw(layers: list[dict[str, Any]], widths: list[dict[str, Any]], output: Path) -> None:
    """CPU a head against the number of layers, and the null's against d_model."""
    from tlspectral.plots.style import BLUE, GREY, ORANGE, dress, new_figure

    figure = new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    left.plot([row["layers"] for row in layers], [1e3 * row["cpu_a_head"] for row in layers], "o-", color=BLUE)
    left.set(xscale="log", xlabel="layers", ylabel="CPU a head (ms)", title="metrics of a head, width 2048")
    without, with_null = widths[0::2], widths[1::2]
    sizes = [row["d_model"] for row in without]

    def of_null(column: str) -> list[float]:
        return [1e3 * (b[column] - a[column]) for a, b in zip(without, with_null, strict=True)]

    draws = with_null[0]["draws"] - without[0]["draws"]
    right.plot(sizes, [1e3 * row["cpu_a_head"] for row in without], "o-", color=BLUE, label="metrics")
    right.plot(sizes, of_null("cpu_a_head"), "s-", color=ORANGE, label=f"null, {draws} draws")
    right.plot(sizes, of_null("eigvals"), "--", color=GREY, label=f"bare eigvals, {draws} matrices")
    right.set(xscale="log", xlabel="d_model", title=f"d_head {without[0]['d_head']}")
    right.legend(frameon=False, fontsize=8, loc="center left")
    for axes, rows in ((left, layers), (right, widths[0::2])):
        ticks = [row["layers" if axes is left else "d_model"] for row in rows]
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        dress(axes)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def main(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Image of how the costs grow.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny shapes, to see that it runs.")] = False,
    only: Annotated[str, typer.Option(help="8b, 405b, olmo2, growth or names; none: all but names.")] = "",
    table_of: Annotated[Path | None, typer.Option("--table", hidden=True)] = None,
    draws: Annotated[int, typer.Option(hidden=True)] = NO_NULL,
) -> None:
    """Measure all shapes, one process after the other."""
    if table_of is not None:
        print(json.dumps(table(table_of, draws)))
        return
    if only not in ("", "8b", "405b", "olmo2", "growth", "names"):
        raise typer.BadParameter("is one of 8b, 405b, olmo2, growth, names", param_hint="--only")
    with tempfile.TemporaryDirectory(prefix="scale_") as temporary:
        folder = Path(temporary)
        if only == "names":
            for shape, (layers, parameters) in NAMES.items():
                (row,) = measured(shape, folder)
                minutes = row["cpu_a_head"] * row["heads"] * layers / 60
                print(f"    {layers} layers: {minutes:.1f} CPU minutes; {4e9 * parameters / 2**30:.1f} GiB in float32")
        if only in ("", "8b"):
            measured(SMALL if small else LLAMA_8B, folder)
        if only in ("", "405b") and not small:
            measured(LLAMA_405B, folder)
        if only in ("", "olmo2") and not small:
            measured(OLMO2_7B, folder)
        if only in ("", "growth"):
            layers = [row for shape in (SMALL_LAYERS if small else GROWING_LAYERS) for row in measured(shape, folder)]
            widths = [row for shape in (SMALL_WIDTH if small else GROWING_WIDTH) for row in measured(shape, folder)]
            if output is not None:
                draw(layers, widths, output)


if __name__ == "__main__":
    typer.run(main)
