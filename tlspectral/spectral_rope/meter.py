"""Largest angle by which learned frequencies have changed over a context, and a Trainer callback that logs it."""

import warnings
from typing import Any

from transformers import TrainerCallback

from tlspectral.spectral_rope.spectral_layers import layers_of

WARN_ABOVE = 0.5


def omega_shift(model: Any, context: int) -> float:
    """Return the largest |change of omega| times `context`, in radians: the largest added rotation at that distance.

    At 0.5 radians a trained head's attention at the far end of its context is already different: the cosine of the
    angle has lost an eighth.

    >>> import tlspectral as tls
    >>> from tlspectral.spectral_rope import omega_shift
    >>> omega_shift(tls.to_spectral(tls.load_model("tiny-rope")), context=64)
    0.0

    Args:
        model: made by `to_spectral` or `SpectralHookedTransformer`.
        context: distance in tokens.

    Raises:
        TypeError: the model is not spectral.

    Not established: that a change is harmful, or that it was learned for a reason. It shows when the model is no longer
    a small change of its base.
    """
    return max(float(module.shift_by_head().abs().max()) for module in layers_of(model).values()) * context


class OmegaMeter(TrainerCallback):
    """Trainer callback that logs `omega_shift`, and warns once when it exceeds 0.5 radians.

    >>> from tlspectral.spectral_rope import OmegaMeter
    >>> OmegaMeter(context=1024).context
    1024

    Pass it as `callbacks=[OmegaMeter(1024)]` to a `transformers.Trainer`. The value is `omega_shift` in
    `trainer.state.log_history`, beside the loss.

    Args:
        context: tokens of the longest text that the model will read.
    """

    def __init__(self, context: int):
        self.context = context
        self._warned = False

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        """Add `omega_shift` to the log record, and warn once if it is large. The Trainer calls this method."""
        shift = omega_shift(model, self.context)
        for record in (logs, *state.log_history[-1:]):
            if record is not None:
                record["omega_shift"] = shift
        if shift > WARN_ABOVE and not self._warned:
            self._warned = True
            warnings.warn(
                f"at step {state.global_step} a learned frequency has changed by {shift:.2f} radians over "
                f"{self.context} tokens, so attention at that distance differs from the starting model: give "
                "frequencies a lower rate (parameter_groups) to stay closer",
                stacklevel=2,
            )
