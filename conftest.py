"""Settings of every test: nothing asks a model hub, torch uses one thread, and hypothesis sets no time limits.

One thread is the faster choice on tiny matrices, and several test processes share the cores.
"""

import os

# Tests look at bars, whatever the caller wants of them. tqdm reads its variables when it is imported, which torch does.
for variable in [name for name in os.environ if name.startswith("TQDM_")]:
    del os.environ[variable]

import contextlib
import functools
import gc
import importlib
import shutil
import socket
from collections import Counter
from pathlib import Path

import hypothesis
import joblib
import pytest
import shape_checks
import torch

pytest_plugins = ["cpu_seconds"]

# Modules of the tests whose asserts are to show their values, as those in test files do.
pytest.register_assert_rewrite("ablation_runs", "conformance", "positional_measurements", "streamed_checkpoints")

os.environ["HF_HUB_OFFLINE"] = "1"
# The variables are for the processes that tests start; this one has read them when torch was imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
torch.set_num_threads(1)

# A time limit on an example fails on a busy machine, and where the first example imports a library.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="sample all that the slow tests can, not a part of it")
    parser.addoption("--device", default="lazy:0", help="where test_conformance_devices.py moves models: cuda, cpu")


@pytest.fixture(scope="session")
def full(request):
    """Whether slow tests are to sample all they can: `make test-slow ARGS=--full`."""
    return request.config.getoption("--full")


@pytest.fixture
def import_benchmark(monkeypatch):
    """A function that imports benchmarks/NAME.py. The test runs in the root, as the command of a benchmark does."""
    root = Path(__file__).parent
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.chdir(root)
    return importlib.import_module


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config, items):
    """Mark slow all but the first cases of a test marked fast, begin with files marked long, and leave out `full`."""
    cases = Counter()
    for item in items:
        mark = item.get_closest_marker("fast")
        if mark and not item.get_closest_marker("slow"):
            cases[test := (item.path, item.originalname)] += 1
            if cases[test] > mark.args[0]:
                item.add_marker("slow")
    items.sort(key=lambda item: not item.get_closest_marker("long"))
    if not config.getoption("--full"):
        left_out = {item for item in items if item.get_closest_marker("full")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collectstart():
    """Import without garbage collection: what is imported stays, and each collection would walk over it."""
    gc.disable()


def pytest_collection_finish():
    """Take what the imports made out of garbage collection, and switch it on."""
    # At its first example hypothesis registers numpy's generator, and its lowest version asks the garbage collector who
    # holds it. A frozen holder is not found.
    hypothesis.find(hypothesis.strategies.just(True), bool)
    gc.enable()
    _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after fixtures of the file are gone
def pytest_runtest_teardown(item, nextitem):
    """Check shapes of the first calls in the next file too, and take what this one leaves out of garbage collection.

    Later files would pay for it, shared models above all. Histories collect after each step: behind a thousand tests
    that took longer than their measurement.
    """
    if nextitem is not None and nextitem.path != item.path:
        shape_checks.check_again()
        _freeze()


def pytest_unconfigure():
    """Give everything back to garbage collection: nanobind reports what is left at the end as leaked."""
    gc.unfreeze()


@pytest.fixture
def unchecked():
    """Types and shapes are not checked while the test runs, which hands over wrong ones."""
    with shape_checks.not_checked():
        yield


@pytest.fixture
def file_size_limit():
    """A context in which no file grows beyond some bytes: a write stops in the middle, as on a full disk."""
    resource = pytest.importorskip("resource")

    @contextlib.contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def spied(monkeypatch):
    """What a function is given at one place, call by call, while it does what it did."""

    def spy(owner, name, at=0):
        real, seen = getattr(owner, name), []

        def watched(*given, **options):
            seen.append(given[at])
            return real(*given, **options)

        monkeypatch.setattr(owner, name, watched)
        return seen

    return spy


@pytest.fixture
def batch_size(monkeypatch):
    """Let a pass on the CPU hold less: `batch_size(tokens=18)`, by the fields of `models.running.batches.Batch`."""
    from tlspectral.models.running import batches

    def hold(**sizes):
        monkeypatch.setattr(batches, "ON_CPU", batches.ON_CPU._replace(**sizes))

    return hold


@pytest.fixture
def no_network(monkeypatch):
    """Any connection attempt fails the test at the line that makes it."""

    def refuse(*_, **__):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine that huggingface_hub asks, in place of the real one. Its cache is empty."""
    import huggingface_hub
    from stand_in_hub import StandInHub

    cache = tmp_path / "hub-cache"
    made = StandInHub(cache)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub waits before it tries again
    huggingface_hub.close_session()
    yield made
    huggingface_hub.close_session()
    made.close()


@pytest.fixture
def dask_cluster():
    """A cluster of two processes, to which joblib sends its work while the test runs."""
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        distributed.LocalCluster(**settings) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        yield


@pytest.fixture(params=[True, False], ids=["with_float64", "without_float64"])
def device(request, monkeypatch):
    """A device other than the CPU, without an accelerator; with float64 the package uses it there, as on CUDA."""
    from stand_in_device import DEVICE, StandInDevice

    if request.param:
        monkeypatch.setattr("tlspectral.algebra.rotary._HAVE_FLOAT64", ("cpu", "lazy"))
    with StandInDevice(float64=request.param):
        yield DEVICE


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A checkpoint folder per architecture, made when first asked for. Not to be changed: copy it."""
    import zoo

    @functools.cache
    def save(name):
        return zoo.save_folder(name, tmp_path_factory.mktemp("saved") / name)

    return save


@pytest.fixture(scope="session")
def row(request):
    """A row of the conformance suite: one model, built and run once for all that is asked of it."""
    from conformance import Row

    return Row(*request.param)


@pytest.fixture
def copied(folder, tmp_path):
    """A checkpoint folder of one's own."""

    def copy(name):
        return shutil.copytree(folder(name), tmp_path / f"{name}-copy")

    return copy


@pytest.fixture
def sizes(monkeypatch):
    """Layers of every model that transformers fills with weights."""
    import transformers

    built = []
    real = transformers.PreTrainedModel.from_pretrained.__func__

    def spy(cls, *given, config, **options):
        built.append(config.get_text_config().num_hidden_layers)
        return real(cls, *given, config=config, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(spy))
    return built
