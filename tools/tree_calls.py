"""Calls of the library by plain settings: the one place that knows how the API of a tree looks.

`compare_trees.py` runs the same items on trees whose API differs. An item names a method of `Calls` and gives it
numbers, names and lists. What an argument is called, which functions have become values, and where a function stands is
decided here, by looking at the tree. Names of columns, fields and attributes are translated by `RENAMED`, so that both
trees write the newer name.
"""

import ast
import contextlib
import dataclasses
import inspect
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import zoo
from tree_inputs import (
    LENGTHS,
    SPECTRAL,
    block_prompt,
    last_token_score,
    rows_for,
    spectral_parameters,
    token_blocks,
    tokens_for,
)

RENAMED = {
    "source": "sender",
    "target": "receiver",
    "source_layer": "sender_layer",
    "source_head": "sender_head",
    "target_layer": "receiver_layer",
    "target_head": "receiver_head",
    "delta_stderr": "delta_se",
    "control_delta_stderr": "control_delta_se",
    "random_delta_stderr": "random_delta_se",
    "stderr": "se",
    "intact_value_stderr": "intact_value_se",
    "sequences": "n_sequences",
}
"""Old and new name of columns, fields and attributes. Both trees write the new one."""

PARTS = {
    "symmetric": "Symmetric",
    "antisymmetric": "Antisymmetric",
    "rope_phase": "RopePhase",
    "rotary_band": "Band",
    "output": "Output",
    "long_range": "LongRange",
    "content": "Content",
    "position": "Position",
    "interaction": "Interaction",
}
"""Name of a part in a call, and the class of `tlspectral.hooks.parts` that stands for it in trees that have one."""


class Absent(Exception):
    """The tree has no function of that name."""


class Calls:
    """The functions of the tree that stands first on the path, called by plain settings."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self.folder = folder
        self.tls: Any = import_module("tlspectral")
        self.root = Path(self.tls.__file__).parent

    @cached_property
    def _homes(self) -> dict[str, list[str]]:
        """Modules of the package by the names of the functions and classes that they define."""
        homes: dict[str, list[str]] = {}
        studies = self.root.parent / "studies"
        for path in [*sorted(self.root.rglob("*.py")), *sorted(studies.glob("tlspectral_studies/**/*.py"))]:
            beside = studies if path.is_relative_to(studies) else self.root.parent
            module = ".".join(path.relative_to(beside).with_suffix("").parts)
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    homes.setdefault(node.name, []).append(module.removesuffix(".__init__"))
        return homes

    def get(self, name: str) -> Any:
        """A public function or class, wherever it stands in this tree."""
        if name in self.tls.__all__:
            return getattr(self.tls, name)
        homes = self._homes.get(name, [])
        of_studies = "tlspectral_studies.", "tlspectral.studies."
        of_core = [home for home in homes if not home.startswith((*of_studies, "tlspectral.plots."))]
        measured = [home for home in homes if home.split(".")[1] != "plots" and ".figures" not in home]
        for among in (of_core, measured, homes):
            if len(among) == 1:
                return getattr(import_module(among[0]), name)
        raise Absent(f"{name}: {len(homes)} definitions in this tree")

    def takes(self, function: Callable[..., Any], argument: str) -> bool:
        """Whether a function has an argument of that name."""
        return argument in inspect.signature(function).parameters

    def quiet(self, name: str, *given: Any, folder: bool = False, **settings: Any) -> Any:
        """Call a function without a progress bar; with a folder twice, so that the second call reads what is stored."""
        function = self.get(name)
        if self.takes(function, "show_progress"):  # older trees; `TQDM_DISABLE` does it in this one
            settings["show_progress"] = False
        if not folder:
            return function(*given, **settings)
        with tempfile.TemporaryDirectory(prefix="resumed_") as place:
            settings["checkpoint_dir" if self.takes(function, "checkpoint_dir") else "folder"] = place
            function(*given, **settings)
            return function(*given, **settings)

    def settled(self, model: Any) -> Any:
        """A model on which no item depends on the ones before it.

        A HookedTransformer keeps the ALiBi of its longest prompt, and the scores of a shorter one are then rounded
        otherwise. So it reads the longest prompt at once.
        """
        if type(model).__name__ == "HookedTransformer" and model.cfg.positional_embedding_type == "alibi":
            with torch.no_grad():
                model(tokens_for(model, 1, model.cfg.n_ctx))
        return model

    # --- settings that are values of the library ---

    def blocks(self, model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> Any:
        """A prompt of blocks that the model can read."""
        return block_prompt(self.get("BlockPrompt"), model, lengths, seed)

    def part(
        self, name: str, options: Mapping[str, Any], model: Any, reference: torch.Tensor
    ) -> tuple[Any, dict[str, Any]]:
        """A part and the arguments that go with it: a value with none of them, or a name with all of them.

        `reference` takes the place of an option of that name.
        """
        options = dict(options)
        lengths = options.pop("blocks", None)
        blocks = self.blocks(model, lengths) if lengths else None
        if options.pop("reference", False):
            options["reference"] = reference
        if hasattr(self.tls, "parts"):
            kind = getattr(self.tls.parts, PARTS[name])
            return (kind(blocks) if blocks is not None else kind(**options)), {}
        return name, options | ({} if blocks is None else {"blocks": blocks})

    def task(self, name: str, model: Any) -> Any:
        """A task by the name that items use."""
        tasks = import_module("tlspectral.tasks")
        tokens = tokens_for(model, 4, 20, seed=3)
        if name == "induction":
            return tasks.induction(n_sequences=4, segment_length=8, seed=3)
        if name == "language":
            return tasks.language(tokens)
        if name == "padded":
            mask = torch.ones_like(tokens)
            mask[1, 14:] = mask[3, 17:] = 0
            return tasks.language(tokens * mask, attention_mask=mask)
        if name == "difference":
            return tasks.logit_difference(tokens, [3, 4, 5, 6], [7, 8, 9, 10])
        if name == "own":
            rows = [row[: 20 - 3 * index] for index, row in enumerate(tokens)]
            labels = pd.DataFrame({"label": ["a", "b", "a", "b"]})
            positions = {"attention" if self.takes(tasks.Task, "attention") else "positions": [(-1, -4)] * 4}
            return tasks.Task(rows, last_token_score, predict=-1, labels=labels, name="own", **positions)
        if name == "text":
            return tasks.language(n_sequences=3, sequence_length=32)
        raise ValueError(name)

    # --- metrics of weights ---

    def analyze_heads(self, model: Any, *, prompts: int = 0, **settings: Any) -> Any:
        """The head table, with that many prompts in place of random ids."""
        if prompts:
            argument = "tokens" if self.takes(self.get("analyze_heads"), "tokens") else "prompts"
            settings[argument] = rows_for(model, prompts)
        return self.quiet("analyze_heads", model, **settings)

    def plain(self, model: Any, *, function: str, **settings: Any) -> Any:
        """A function of a model whose settings are numbers and names."""
        return self.quiet(function, model, **settings)

    def k_composition(self, model: Any, *, head: str, kind: str) -> Any:
        """Composition of all earlier heads with one."""
        function = self.get("k_composition")
        if self.takes(function, "kind"):
            return function(model, head, kind=kind)
        return function(model, f"{head}.{kind}")

    def compare_heads(self, model: Any, *, other: Any, **settings: Any) -> Any:
        """The head tables of two models, compared."""
        return self.get("compare_heads")(*(self.analyze_heads(one, **settings) for one in (model, other())))

    def operators(self, model: Any, *, heads: list[str]) -> Any:
        """Factors, spectra and phase operators of some heads, and the output-value operators of layer 1."""
        operators = self.get("qk_operators")(model)
        found: dict[str, Any] = {"ov": [head.dense() for head in self.get("ov_operators")(model, 1)]}
        for name in heads:
            head = operators[name]
            spectrum = head.spectrum()
            found[name] = {
                "w_q": head.w_q,
                "w_k": head.w_k,
                "antisymmetric": _product(head.antisymmetric()),
                "spectrum": {field.name: getattr(spectrum, field.name) for field in dataclasses.fields(spectrum)},
                "angles": head.schur_angles(),
            }
            if head.rotary is not None:
                found[name] |= {"phase": [_product(getattr(head.phase(0), side)) for side in ("re", "im")]}
        return found

    def qk_penalty(self, model: Any, *, part: str, gradient: bool = True, **settings: Any) -> Any:
        """The share of a part, and the gradient of every parameter that has one."""
        share = self.get("qk_penalty")(model, part, **settings)
        if not gradient:
            return share
        parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        found = torch.autograd.grad(share, list(parameters.values()), allow_unused=True)
        gradients = {name: value for name, value in zip(parameters, found, strict=True) if value is not None}
        return {"share": share, "gradient": gradients}

    # --- what heads do ---

    def detect_heads(self, model: Any, *, prompts: int = 0, pattern: Any = None, **settings: Any) -> Any:
        """Detector scores, on repeated sequences or on that many prompts of unequal length."""
        if prompts:
            settings["prompts"] = rows_for(model, prompts)
        if pattern == "two back":
            pattern = lambda row: torch.eye(len(row)).roll(2, 0).tril()  # noqa: E731
        return self.quiet("detect_heads", model, pattern=pattern, **settings)

    def top_pairs(self, model: Any, **settings: Any) -> Any:
        """The largest pairs of each head, of prompts of unequal length."""
        return self.get("top_pairs")(model, None, rows_for(model, 4), **settings)

    def kernels(self, model: Any, *, function: str, padded: bool = False, **settings: Any) -> Any:
        """Relative-position kernels and how they are predicted."""
        prompts = rows_for(model, 4) if padded else tokens_for(model, 4, 20, seed=5)
        return self.get(function)(model, None, prompts, **settings)

    def directions(self, model: Any, *, head: str, kind: str, task: str | None = None) -> Any:
        """Singular directions of a head in words."""
        given = {} if task is None else {"task": self.task(task, model)}
        return self.get("head_directions")(model, head, kind, n_directions=3, n_words=4, draws=20, **given)

    # --- interventions ---

    def into(self, heads: Any, what: str) -> dict[str, Any]:
        """The arguments of `ablate` for an edge into what some heads read."""
        if self.takes(self.get("ablate"), "input"):
            return {"into": heads, "input": what}
        return {"into": self.get("receivers")(heads, what)}

    @contextlib.contextmanager
    def _ablated(self, model: Any, heads: Any, part: str, options: Mapping[str, Any]) -> Iterator[Any]:
        options = dict(options)
        into, what = options.pop("into", None), options.pop("input", None)
        value, arguments = self.part(part, options, model, tokens_for(model, 3, 24, seed=7))
        ablate = self.get("ablate")
        if into is not None:
            arguments |= self.into(into, what)
        with ablate(model, heads, value, **arguments) as ablated:
            yield ablated

    def ablate(self, model: Any, *, heads: Any, part: str, score: str = "logits", **options: Any) -> Any:
        """Logits, the score of a task, or the gradients of the loss, while a part of some heads is removed."""
        # The ids are those that a block prompt of the same model has, so that blocks stand where they should.
        prompt = self.blocks(model, options.get("blocks") or LENGTHS)
        tokens = torch.cat([prompt.prefix, *prompt.blocks, prompt.suffix])[None]
        tokens = torch.cat([tokens, tokens_for(model, 2, tokens.shape[1], seed=2)])
        with self._ablated(model, heads, part, options):
            if score == "logits":
                with torch.no_grad():
                    return model(tokens, return_type="logits")
            if score == "gradient":
                parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
                loss = model(tokens, return_type="loss")
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                norms = {name: value.norm() for name, value in zip(parameters, found, strict=True) if value is not None}
                return {"loss": loss, "norm": norms}
            return self.evaluate(model, task=score)

    def evaluate(self, model: Any, *, task: str) -> Any:
        """The score of the model as it is."""
        found = self.get("evaluate")(model, self.task(task, model))
        error = found.se if hasattr(found, "se") else found.stderr
        return {"per_sequence": found.per_sequence, "value": found.value, "se": error}

    def ablation_hooks(self, model: Any, *, heads: Any, part: str) -> Any:
        """Logits under the list of hooks."""
        value, arguments = self.part(part, {}, model, tokens_for(model, 3, 24, seed=7))
        hooks = self.get("ablation_hooks")(model, heads, value, **arguments)
        with torch.no_grad():
            return model.run_with_hooks(tokens_for(model, 2, 20), return_type="logits", fwd_hooks=hooks)

    def sweep(self, model: Any, *, part: str, task: str, heads: Any = None, **options: Any) -> Any:
        """A sweep over heads."""
        own = {key: options.pop(key) for key in ("control", "screen", "seed", "folder") if key in options}
        if options.get("replace") == "resample" and hasattr(self.tls, "parts"):
            options["seed"] = own.get("seed", 0)  # a sweep's own seed drew the sequences before parts were values
        value, arguments = self.part(part, options, model, tokens_for(model, 5, 20, seed=9))
        return self.quiet("ablation_sweep", model, value, heads=heads, task=self.task(task, model), **arguments, **own)

    def bands(self, model: Any, *, heads: Any, task: str, **settings: Any) -> Any:
        """Thirds of the rotary frequencies removed."""
        return self.quiet("band_effects", model, heads, task=self.task(task, model), draws=2, **settings)

    def edges(self, model: Any, *, heads: Any, what: str, measure: str, senders: Any = None, **settings: Any) -> Any:
        """Edges into what some heads read. `measure` is a detector, `attention`, or a task after `task:`."""
        edge_effects = self.get("edge_effects")
        on_task = measure.startswith("task:")
        task = measure[5:] if on_task else ("own" if measure == "attention" else "induction")
        settings["task"] = self.task(task, model)
        if self.takes(edge_effects, "input"):
            settings |= {"input": what, "sources": senders, "effect": "task" if on_task else "attention"}
            settings |= {} if on_task else {"score": measure}
            return self.by_receiver(self.quiet("edge_effects", model, heads, **settings), model, what, on_task)
        settings |= {"senders": senders, "measure": "task" if on_task else measure}
        return self.quiet("edge_effects", model, self.get("receivers")(heads, what), **settings)

    def by_receiver(self, table: pd.DataFrame, model: Any, what: str, on_task: bool) -> pd.DataFrame:
        """A table of edges into heads, with the receivers' names; for a task one row for keys that heads share."""
        view, names = self.get("attention_view")(model), []
        for layer, head in zip(table["target_layer"], table["target_head"], strict=True):
            raw = view.raw(int(layer))
            size = 1 if what == "q" else len(raw.w_q) // len(raw.w_k)
            names.append(f"L{layer}H{head}.{what}" if size == 1 else f"L{layer}KV{head // size}.{what}")
        named = table.assign(target=names)
        if on_task:
            edge = ["target", "source"]
            named["k_composition"] = named.groupby(edge, sort=False)["k_composition"].transform("mean")
            named = named.assign(attention=float("nan")).drop_duplicates(edge, ignore_index=True)
        named.attrs = table.attrs
        return named

    def attribution(self, model: Any, *, head: str, query: int, key: int, **settings: Any) -> Any:
        """One score as a sum."""
        prompt = tokens_for(model, 1, 18, seed=4)[0]
        return self.get("qk_attribution")(model, prompt, head, query, key, **settings)

    # --- positional scores ---

    def positional(self, model: Any, *, lengths: Any = (3, 4, 2, 3), prompts: int = 1, **settings: Any) -> Any:
        """Positional and symbolic scores on prompts of blocks."""
        given = [self.blocks(model, tuple(lengths), 1 + index) for index in range(prompts)]
        if self.takes(self.get("positional_symbolic"), "every_query"):  # older trees
            settings["every_query"] = settings.pop("by", None) == "query"
            settings["exclude_first_block"] = settings.get("swaps", "kept") == "kept"
        found = self.quiet("positional_symbolic", model, given[0] if prompts == 1 else given, **settings)
        return _scores(found, errors=False)

    def on_task(
        self, model: Any, *, size: int | None = None, swapped: int, queries: int, draws: int, **settings: Any
    ) -> Any:
        """Positional and symbolic scores over draws of the binding task, or of a block task of token ids."""
        older = "positional_symbolic_profile" in self._homes
        if size is not None:
            task = self.get("BindingTask")(**{"n_pairs" if older else "n_blocks": size})
        else:
            task = token_blocks(self.get("BlockTask"), self.get("BlockDraw"), self.get("Question"), model)
        if older:
            settings |= {"n_blocks": swapped, "queries": queries, "draws": draws}
            found = _fields(self.quiet("positional_symbolic_profile", model, task, **settings))
            means = found["answers"].assign(first=found["answers"]["rank"] == 1)
            answers = means[["probability", "first", "relative_probability", "chance"]].mean().to_dict()
            tables = {name: found[name] for name in ("heads", "queries", "draws", "frequencies")}
            tests = found["median_tests"]
        else:
            task = dataclasses.replace(task, swapped=swapped, queries=queries, draws=draws)
            frequencies = settings.pop("per_frequency", False)
            asked = {"heads": {}, "queries": {"by": "query"}, "draws": {"by": "draw"}}
            asked |= {"frequencies": {"per_frequency": True}} if frequencies else {}
            tables = {
                name: self.quiet("positional_symbolic", model, task, **settings, **by) for name, by in asked.items()
            }
            answers, tests = tables["heads"].attrs["answers"], self.get("median_tests")(tables["heads"])
        scores = {name: _scores(one, errors=name != "draws") for name, one in tables.items() if one is not None}
        return {**scores, "answers": answers, "tests": pd.DataFrame(tests)}

    def on_blocks(self, model: Any, *, function: str, **settings: Any) -> Any:
        """A function of a prompt of blocks: shares of its logits, attention before and after swaps, norms."""
        prompt = self.blocks(model)
        given = [settings.pop(key) for key in ("heads", "head") if key in settings]
        return self.get(function)(model, prompt, *given, **settings)

    # --- spectral models ---

    def spectral(self, model: Any, *, ask: str, build: Any = None, **settings: Any) -> Any:
        """A spectral model moved from its start by a seeded draw: logits, gradients, or those of the merged model."""
        spectral = self.get("to_spectral")(build() if build else model, **settings)
        self.moved(spectral, ("gain", "phase") if ask == "merge" else SPECTRAL)
        if ask == "gradients":
            return self.gradients(spectral, model)
        if ask == "heads":
            return self.analyze_heads(spectral, null_draws=3)
        ran = self.get("merge")(spectral) if ask == "merge" else spectral
        with torch.no_grad():
            found = ran(tokens_for(model, 2, 20))
        return getattr(found, "logits", found)

    def moved(self, spectral: Any, only: tuple[str, ...] = SPECTRAL) -> Any:
        """A spectral model with some parameters displaced, in place, by draws that depend on layer and name alone."""
        with torch.no_grad():
            for name, value in spectral_parameters(spectral).items():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                if name.rsplit(".", 1)[-1] in only:
                    value += 0.1 * torch.randn(value.shape, generator=generator).to(value)
        return spectral

    def gradients(self, spectral: Any, model: Any) -> Any:
        """The loss and the gradients of the spectral parameters."""
        tokens = tokens_for(model, 2, 20)
        of_transformers = hasattr(spectral, "config") and not hasattr(spectral, "cfg")
        loss = spectral(tokens, labels=tokens).loss if of_transformers else spectral(tokens, return_type="loss")
        wanted = {name: value for name, value in spectral_parameters(spectral).items() if value.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return {"loss": loss} | {f"{name} gradient": value for name, value in zip(wanted, found, strict=True)}

    # --- histories ---

    def history(
        self, _: Any, *, checkpoints: Any, task: str | None = None, blocks: bool = False, **settings: Any
    ) -> Any:
        """Head tables over checkpoints."""
        given = checkpoints() if callable(checkpoints) else checkpoints
        if task is not None:
            settings["task"] = self.task(task, None)
        if blocks:
            settings["blocks"] = self.blocks(None)
        return _fields(self.quiet("head_history", given, **settings))

    # --- other models ---

    def from_folder(self, _: Any, *, function: str, model: str, head: str = "", **settings: Any) -> Any:
        """A function of a folder of weights that is read without loading the model."""
        given = (self.folder(model), head) if head else (self.folder(model),)
        return self.quiet(function, *given, **settings)

    def from_scratch(self, _: Any, *, log_omega: bool) -> Any:
        """Logits and gradients of a model that is spectral from the start."""
        cfg = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_vocab": 97, "n_ctx": 64, "act_fn": "silu"}
        cfg |= {"d_mlp": 64, "normalization_type": "RMS", "n_key_value_heads": 2, "rotary_dim": 8, "device": "cpu"}
        cfg |= {"positional_embedding_type": "rotary", "seed": 0, "initializer_range": 0.4}
        model = self.get("SpectralHookedTransformer")(cfg, log_omega=log_omega)
        return self.gradients(self.moved(model), model)

    def refused_model(self, _: Any, *, name: str) -> Any:
        """The head table of an architecture that is not supported."""
        return self.analyze_heads(self.get("load_model")(zoo.hf_model(name)), null_draws=2)

    # --- tables and numbers alone ---

    def statistic(self, _: Any, *, function: str, make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        """A statistic of fixed tables."""
        given, settings = make()
        return self.get(function)(*given, **settings)

    def refused(self, model: Any, *, function: str, given: Any = (), settings: Any = None) -> Any:
        """A call that has to be refused."""
        call, settings = self.get(function), dict(settings or {})
        if "into" in settings:
            settings |= self.into(settings["into"], settings.pop("input"))
        if function == "edge_effects" and not self.takes(call, "input"):
            given = (self.get("receivers")(*given, "k"),)
        if function == "ablate":
            with call(model, *given, **settings):
                return "entered"
        return call(model, *given, **settings)


def _scores(table: pd.DataFrame, *, errors: bool) -> pd.DataFrame:
    """What tables of scores have on every tree, in one order."""
    keys = ["layer", "head", "frequency", "query", "draw"]
    scores = ["s_pos", "s_sym", "exclusion_index", "logit_std", "tau", "alpha_ess"]
    errors_of = [f"{score}_se" for score in scores if errors]
    shown = table[[name for name in (*keys, *scores, *errors_of) if name in table]]
    renamed = ("exclude_first_block", "n_pairs", "n_tokens", "task")
    shown.attrs = {name: value for name, value in table.attrs.items() if name not in renamed}
    return shown


def _fields(found: Any) -> Any:
    """The tables of a result that holds several."""
    if not dataclasses.is_dataclass(found):
        return found
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def _product(thin: Any) -> torch.Tensor:
    return thin.dense() if hasattr(thin, "dense") else torch.as_tensor(thin)
