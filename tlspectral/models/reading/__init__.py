"""Read the attention layers of a model. No other code reads a model's internals.

`attention_view(model)` accepts a TransformerBridge (raw or processed) and a HookedTransformer (folded or not).
`with measured(model) as view:` opens a measurement.
"""

from tlspectral.models.reading.view import attention_view, measured

__all__ = ["attention_view", "measured"]
