"""Progress bars of huggingface_hub, and bars and messages of transformers, switched off inside a context."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tlspectral.tables.progress import hidden


def download_bars() -> AbstractContextManager[None]:
    """Return a context in which huggingface_hub shows its bars, unless bars are switched off."""
    return _without_hub_bars() if hidden() else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log messages and progress bars inside the context, and restore its settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with _without_hub_bars():  # transformers switches the hub's bars together with its own
        logging.set_verbosity_error()
        try:
            logging.disable_progress_bar()
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextmanager
def _without_hub_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    with warnings.catch_warnings():
        # The hub warns if an environment variable has decided about its bars, which then stays in force.
        warnings.filterwarnings("ignore", message=".*HF_HUB_DISABLE_PROGRESS_BARS")
        disable_progress_bars()
        try:
            yield
        finally:
            restore()
