"""Heads, layers, receivers and parts, in every form in which users write them."""

from tlspectral.selection.heads_as_written import (
    HEADS_PER_GROUP,
    Head,
    Heads,
    from_end,
    group_heads,
    head_pair,
    head_pairs,
    named_head,
    named_heads,
    only_pair,
    pair_in_table,
    pairs_in_table,
    recorded_groups,
    which_exist,
)
from tlspectral.selection.node_names import (
    Receiver,
    group_name,
    head_name,
    naming_nodes,
)
from tlspectral.selection.parts_as_written import (
    Symbol,
    chosen_part,
    counted,
)
from tlspectral.selection.receivers_as_written import (
    RECEIVER_FORMS,
    Receivers,
    head_and_input,
    named_column,
    read_receivers,
    receivers,
)

__all__ = [
    "HEADS_PER_GROUP",
    "RECEIVER_FORMS",
    "Head",
    "Heads",
    "Receiver",
    "Receivers",
    "Symbol",
    "chosen_part",
    "counted",
    "from_end",
    "group_heads",
    "group_name",
    "head_and_input",
    "head_name",
    "head_pair",
    "head_pairs",
    "named_column",
    "named_head",
    "named_heads",
    "naming_nodes",
    "only_pair",
    "pair_in_table",
    "pairs_in_table",
    "read_receivers",
    "receivers",
    "recorded_groups",
    "which_exist",
]
