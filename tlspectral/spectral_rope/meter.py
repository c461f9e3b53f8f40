"""How far learned frequencies have turned from their start over a context, in radians, and a Trainer callback of it."""

import warnings
from typing import Any

from transformers import TrainerCallback

from tlspectral.spectral_rope.spectral_layers import layers_of

WARN_ABOVE = 0.5


def omega_shift(model: Any, context: int) -> float:
    """Return the largest |change of omega| times `context`, in radians: how far a pair has turned at that distance.

    At 0.5 a trained head's attention at the far end of its context is already another: the cosine of the angle has
    lost an eighth.

    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import omega_shift
    >>> omega_shift(tls.to_spectral(tls.load_model("tiny-rope")), context=64)
    0.0

    Args:
        model: what `to_spectral` or `SpectralHookedTransformer` made.
        context: tokens.

    Raises TypeError for a model that is not spectral.

    What it does not establish: that a change is harmful, or that one is learned. It says when the model at hand is no
    longer a small change of the one that it was made from.
    """
    return max(float(module.shift_by_head().abs().max()) for module in layers_of(model).values()) * context


class OmegaMeter(TrainerCallback):
    """Put `omega_shift` into the log of a `transformers.Trainer`, and warn once when it passes 0.5 radians.

    The record is `omega_shift` in `trainer.state.log_history`, beside the loss.

    Args:
        context: tokens of the longest text that the model is to read.
    """

    def __init__(self, context: int):
        self.context = context
        self._warned = False

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **named: Any) -> None:
        """Add the number to what is logged. Called by the Trainer."""
        shift = omega_shift(model, self.context)
        for record in (logs, *state.log_history[-1:]):
            if record is not None:
                record["omega_shift"] = shift
        if shift > WARN_ABOVE and not self._warned:
            self._warned = True
            warnings.warn(
                f"at step {state.global_step} a learned frequency turned by {shift:.2f} radians over {self.context} "
                "tokens: attention at that distance is no longer that of the model at the start; a lower rate for the "
                "frequencies (parameter_groups) keeps it closer",
                stacklevel=2,
            )
