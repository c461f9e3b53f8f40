"""HTML pages that load nothing from a network: `report` shows a table of heads, `head_card` a single head."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.report.card import HeadCard, head_card
    from tlspectral.report.page import report

__all__ = ["HeadCard", "head_card", "report"]

# Names are imported on first use, because the page of a table needs no model code.
__getattr__, __dir__ = lazy_names(__name__)
