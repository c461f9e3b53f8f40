"""What every head does: known types of head, each with a null of its own."""

from tlspectral.heads.types.kinds import TYPES, HeadType
from tlspectral.heads.types.table import head_types

__all__ = ["TYPES", "HeadType", "head_types"]
