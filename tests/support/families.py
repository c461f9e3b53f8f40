"""What becomes of a tiny model of every family: loaded, checked, compared with transformers' own model, and streamed.

`python tests/support/families.py [FAMILY ...]` writes the outcomes with the TransformerLens that is installed into the
table of the docs.
"""

import csv
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from family_configs import NOT_BUILT, families, forms, tiny_config
from streamed_checkpoints import analyze, assert_streamed_equals_loaded
from torch import nn
from zoo import prompt

import tlspectral as tls
from tlspectral.errors import TlspectralError
from tlspectral.models.checkpoints import layers as checkpoint_layers
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until

TABLE = Path(__file__).parents[2] / "docs" / "site" / f"families-tl{version('transformer-lens')[0]}.csv"
_QUERY_KEY = ("q_proj", "k_proj", "query", "key", "q_attn", "q_b_proj", "kv_b_proj")
_JOINT = ("query_key_value", "c_attn", "qkv_proj", "Wqkv", "attn_qkv")


class Outcome(NamedTuple):
    """What became of a form of a family.

    `loaded` is reproduced (`reason` then says what layers are skipped), refused, not built, raw (an error of another
    kind) or silent (a table of a model that computes something else). `streamed` is reproduced, refused, raw, silent
    (another table than the loaded one), unconfirmed (a table where the loaded model is refused), or empty where nothing
    was built.
    """

    family: str
    form: str
    loaded: str
    streamed: str
    reason: str


@torch.no_grad()
def jitter(model: nn.Module) -> None:
    """Move norms, biases and other vectors off their first values and enlarge query and key weights, in place."""
    for path, module in model.named_modules():
        kind = path.rsplit(".", 1)[-1]
        for value in module.parameters(recurse=False):
            if value.ndim == 1 or "norm" in type(module).__name__.lower():
                # A gain of queries and keys is enlarged: under such a norm the size of their weights does not matter.
                value += 0.3 * torch.randn_like(value) + 0.6 * (kind in ("q_norm", "k_norm"))
            elif kind in _QUERY_KEY:
                value *= 5
            elif kind in _JOINT:
                value *= 3
    for name, value in model.named_buffers():
        if name.endswith("layer_scalar"):  # of Gemma 4: on the stream behind a layer
            value *= 0.7


def save(family: str, form: dict[str, Any], folder: str) -> None:
    """Write a tiny model of a family, which runs in transformers, to a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(family, **form)
        if family == "gemma3n":  # without its towers for images and sound, which need the package timm
            config = config.text_config
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        jitter(model)
    model(prompt())
    model.save_pretrained(folder)


def outcome(family: str, form: str, changes: dict[str, Any]) -> Outcome:
    """Return what becomes of one form of a family."""
    if (family, form) in NOT_BUILT:
        return Outcome(family, form, "not built", "", NOT_BUILT[family, form])
    with tempfile.TemporaryDirectory(prefix="family_") as folder:
        try:
            save(family, changes, folder)
        except Exception as error:
            return Outcome(family, form, "not built", "", f"{type(error).__name__}: {error}")
        loaded, table, reason = _road(lambda: _loaded_table(folder))
        if table is not None and "skipped_layers" in table.attrs:
            skipped = table.attrs["skipped_layers"]
            reasons = "; ".join(dict.fromkeys(each["reason"] for each in skipped))
            reason = f"without {len(skipped)} of {table.attrs['n_layers']} layers: {reasons}"
        with mock.patch.object(checkpoint_layers, "STREAMED_MODEL_TYPES", _Everything()):
            streamed, streamed_table, streamed_reason = _road(lambda: analyze(folder, null_draws=2))
        if streamed_table is not None and table is None:
            streamed, streamed_reason = "unconfirmed", ""
        elif streamed_table is not None:
            try:
                assert_streamed_equals_loaded(streamed_table, table)
            except AssertionError as error:
                streamed, streamed_reason = "silent", f"another table: {error}"
    text = " ".join((reason or streamed_reason).replace(folder, "it").split())
    return Outcome(family, form, loaded, streamed, text)


class _Everything(tuple[str, ...]):
    """A list of model types that holds every name: what could be streamed, on the list or not."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return True


class _Differs(AssertionError):
    pass


def _road(take: Callable[[], Any]) -> tuple[str, Any, str]:
    """Return outcome, table and reason of a road to a table."""
    try:
        return "reproduced", take(), ""
    except TlspectralError as error:
        return "refused", None, str(error)
    except _Differs as error:
        return "silent", None, str(error)
    except Exception as error:
        return "raw", None, f"{type(error).__name__}: {error}"


def _loaded_table(folder: str) -> Any:
    model = tls.load_model(folder)
    table = analyze(model, null_draws=2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    view, tokens = attention_view(model), prompt()
    names = [view.hook_names(index)["pattern"] for index in view.layers]
    patterns = capture_until(view, tokens, names, last=names[-1])
    with torch.no_grad():
        expected, logits = reference(tokens, output_attentions=True), model(tokens, return_type="logits")
    # Measured: at most 6e-7 of the largest logit, and 3e-7 in a pattern. A window, a norm or a multiplier that is not
    # read moves both by 1e-3 and more.
    if float((logits - expected.logits).abs().max()) > 1e-5 * float(expected.logits.abs().max()):
        raise _Differs("its logits are not those of transformers")
    # Of a hybrid transformers returns the patterns of some layers, or None in between.
    whole = expected.attentions if len(expected.attentions) == view.n_layers else None
    theirs = expected.attentions if whole is None else [whole[index] for index in view.layers]
    for name, pattern in zip(names, theirs, strict=True):
        if float((patterns[name] - pattern).abs().max()) > 1e-5:
            raise _Differs(f"{name} is not the attention of transformers")
    return table


def stored(path: Path = TABLE, kind: type[Any] = Outcome) -> dict[tuple[str, str], Any]:
    """Return the outcomes that a table of the docs holds, by family and form."""
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["family"], row["form"]): kind(**row) for row in csv.DictReader(file)}


def write(path: Path, kind: type[Any], keys: Iterable[tuple[str, str]], chosen: Iterable[str], make: Any) -> None:
    """Write the outcomes of some families into a table, of all where none is named; those of others stay as they are.

    `make` gives the outcome, of a `kind`, of a family, a form, and the settings of that form.
    """
    before, chosen, keys = stored(path, kind) if path.exists() else {}, set(chosen), list(keys)
    new = sorted({family for family, _ in keys} - {family for family, _ in before})
    sys.stdout.write(f"{path.name}, new since the last table: {', '.join(new) or 'no family'}\n")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind._fields)
        for family, form in keys:
            known = before.get((family, form)) if chosen and family not in chosen else None
            writer.writerow(known or make(family, form, forms(family)[form]))
            file.flush()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    write(TABLE, Outcome, ((family, form) for family in families() for form in forms(family)), sys.argv[1:], outcome)
