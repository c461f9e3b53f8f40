"""One HTML page about a table of heads, which loads nothing from a network.

The room can be called itself: `tls.report(heads)` is `tls.report.report(heads)`.
"""

import sys
from types import ModuleType
from typing import Any

from tlspectral.report.page import Page, report


class _Report(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Page:
        return report(*args, **options)


sys.modules[__name__].__class__ = _Report

__all__ = ["Page", "report"]
