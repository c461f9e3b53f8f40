"""What a reader gives: the functions by which a view reads one kind of model.

`bridge` reads a TransformerBridge, `hooked_transformer` a HookedTransformer. Each is a module that defines all of these
functions. A third kind of model needs a third module, a name in `READERS` (`view.py`), and nothing else.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tlspectral.models.reading.layer import RawAttention
from tlspectral.models.reading.norms import MlpInput, Normalization


@runtime_checkable
class Reader(Protocol):
    """Functions of a module that reads one kind of model. `model` is the model itself, `layer` counts from 0.

    A layer or norm that cannot be read raises UnsupportedArchitecture; weights that cannot be read raise BadWeights.
    """

    # --- weights of a layer ---

    def read_attention(self, model: Any, layer: int) -> RawAttention:
        """Return the attention parameters of one layer, as the model holds them."""
        ...

    def read_output(self, model: Any, layer: int) -> tuple[Tensor | None, Normalization, float]:
        """Return b_O, the norm behind the attention, and the factor on what its heads add to the stream."""
        ...

    def read_mlp_input(self, model: Any, layer: int) -> MlpInput:
        """Return the hook point at which the MLP of a layer reads, and the norm in front of that point."""
        ...

    def final_normalization(self, model: Any) -> Normalization:
        """Return the norm in front of the unembedding."""
        ...

    # --- positions and masks ---

    def rotary_tables(
        self, model: Any, layer: int, n_positions: int, captured: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the scaled (cos, sin) that a layer applied in a run, each [(batch,) pos, columns]; None without."""
        ...

    def frequency_switch(self, model: Any, n_positions: int) -> int | None:
        """Return the largest length below `n_positions` past which rotary frequencies change; None without."""
        ...

    def seen_keys(self, model: Any, layer: int, n_positions: int) -> Tensor:
        """Return which keys each query may see, [pos, pos], by causality and the layer's window."""
        ...

    def selected_keys(self, model: Any, layer: int) -> int | None:
        """Return how many of the seen keys an indexer picks for each query; None without an indexer."""
        ...

    def unmasked(self, model: Any, layer: int, scores: Tensor) -> Tensor:
        """Return which of the scores that a layer exposes (or of some of them) are of keys that the query sees."""
        ...

    # --- key/value caches ---

    def prefill_cache(self, model: Any, tokens: Tensor) -> Any:
        """Run the model on `tokens` [batch, pos] and return its key/value cache; None where it keeps none."""
        ...

    def joined_caches(self, caches: list[Any]) -> Any:
        """Return one cache with the rows of several; None where a layer keeps more than keys and values."""
        ...

    def cache_bytes(self, cache: Any) -> int:
        """Return the size of the keys and values of all rows of a cache, in bytes."""
        ...

    def continued_logits(self, model: Any, cache: Any, tokens: Tensor, rows: Tensor, alive: Sequence[int]) -> Tensor:
        """Return logits of tokens that follow cached ones; `rows` names the row of the cache for each row of tokens.

        `alive` says by layer how many of the rows, the first ones, it runs.
        """
        ...
