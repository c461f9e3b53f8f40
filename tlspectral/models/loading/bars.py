"""Progress bars of huggingface_hub, and bars and messages of transformers, switched off inside a context."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def download_bars(shown: bool) -> Iterator[None]:
    """Switch off huggingface_hub's bars inside the context, unless `shown`."""
    if shown:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    with _no_warning():
        disable_progress_bars()
    try:
        yield
    finally:
        with _no_warning():
            restore()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log messages and progress bars inside the context, and restore its settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with download_bars(False):  # transformers switches the hub's bars together with its own
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                with _no_warning():
                    logging.enable_progress_bar()


@contextmanager
def _no_warning() -> Iterator[None]:
    # The hub warns if an environment variable has decided about its bars, which then stays in force.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
