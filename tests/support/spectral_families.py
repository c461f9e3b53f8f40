"""What becomes of a tiny model of every reproduced family when its rotations learn: of transformers, and its bridge.

`python tests/support/spectral_families.py [FAMILY ...]` writes the outcomes with the TransformerLens that is installed
into the table of the docs.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from families import save, stored, write
from spectral_zoo import move
from zoo import prompt

import tlspectral as tls
from tlspectral.errors import TlspectralError
from tlspectral.spectral_rope import to_spectral

TABLE = Path(__file__).parents[2] / "docs" / "site" / f"spectral-families-tl{version('transformer-lens')[0]}.csv"


class Outcome(NamedTuple):
    """What became of a form of a family when its rotations learn.

    `transformers` and `bridge` are trains, trains alone (the model cannot recompute its blocks, with or without
    learned rotations), refused, raw (an error of another kind) or wrong (another function, or other gradients).
    """

    family: str
    form: str
    transformers: str
    bridge: str
    reason: str


ROUNDED = ("bamba", "falcon_h1")
"""Families whose state-space blocks, run again for gradients, round otherwise on some processors."""


class _Wrong(AssertionError):
    pass


def outcome(family: str, form: str, changes: dict[str, Any]) -> Outcome:
    """Return what becomes of one form of a family."""
    with tempfile.TemporaryDirectory(prefix="family_") as folder:
        save(family, changes, folder)
        bridge, spectral_bridge, bridge_reason = _road(lambda: _bridge(folder))
        found, _, reason = _road(lambda: _model(folder, spectral_bridge))
    return Outcome(family, form, found, bridge, " ".join((reason or bridge_reason).replace(folder, "it").split()))


def _road(take: Callable[[], tuple[str, Any]]) -> tuple[str, Any, str]:
    """Return outcome, what was made, and the reason where nothing was."""
    try:
        return *take(), ""
    except (TlspectralError, ValueError) as error:
        return "refused", None, str(error)
    except _Wrong as error:
        return "wrong", None, str(error)
    except Exception as error:
        return "raw", None, f"{type(error).__name__}: {error}"


def _bridge(folder: str) -> tuple[str, Any]:
    base = tls.load_model(folder)
    spectral = move(to_spectral(base))  # which compares the logits at the start with the model's own, bit for bit
    found = _checkpointed(base, spectral, spectral.original_model, lambda: spectral(prompt(), return_type="loss"))
    if any(parameter.grad is not None for parameter in base.parameters()):
        raise _Wrong("the model that was given has gradients")
    return found, spectral.eval()


def _model(folder: str, bridge: Any) -> tuple[str, Any]:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    spectral = move(to_spectral(base))
    if bridge is not None:
        with torch.no_grad():
            logits, expected = spectral(prompt()).logits, bridge(prompt(), return_type="logits")
        # The bridge rotates at its hook points, by other code. Measured: at most 2e-6 of the largest logit; a rotation
        # left out, or on the other side of a norm, moves it by 1e-2 and more.
        if float((logits - expected).abs().max()) > 1e-5 * float(expected.abs().max()):
            raise _Wrong("it is not the function of its bridge")
    found = _checkpointed(base, spectral, spectral, lambda: spectral(input_ids=prompt(), labels=prompt()).loss)
    if any(parameter.grad is not None for parameter in base.parameters()):
        raise _Wrong("the model that was given has gradients")
    return found, spectral


def _checkpointed(base: Any, spectral: Any, wrapped: Any, loss: Callable[[], torch.Tensor]) -> str:
    """Compare the gradients with those under both kinds of gradient checkpointing."""
    spectral.train()
    wanted = gradients(spectral, loss)
    if not wanted or not all(bool(gradient.isfinite().all()) for gradient in wanted.values()):
        raise _Wrong("it has no finite gradients")
    if not wrapped.supports_gradient_checkpointing:
        return "trains alone"
    same = _same_but_for_rounding if wrapped.config.model_type in ROUNDED else torch.equal
    for reentrant in (True, False):
        wrapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
            raise _Wrong("the model that was given is checkpointed too")
        found = gradients(spectral, loss)
        wrapped.gradient_checkpointing_disable()
        if found.keys() != wanted.keys() or not all(same(found[key], wanted[key]) for key in wanted):
            raise _Wrong(f"other gradients under checkpointing, use_reentrant={reentrant}")
    return "trains"


def _same_but_for_rounding(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    # Measured 1.1e-6 of the largest entry. A gradient that is missing or counted twice is off by its own size.
    return float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def gradients(spectral: Any, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients by name after `loss`."""
    spectral.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some families drop activations in training
        loss().backward()
    return {name: value.grad.clone() for name, value in spectral.named_parameters() if value.grad is not None}


def reproduced() -> list[tuple[str, str]]:
    """Families and forms whose loaded model is reproduced."""
    return [key for key, row in stored().items() if row.loaded == "reproduced"]


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    write(TABLE, Outcome, reproduced(), sys.argv[1:], outcome)
