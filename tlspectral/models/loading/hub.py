"""Hub models: what their names mean, and their files, fetched from the hub where its cache on this machine lacks them.

huggingface_hub marks in the cache which files the hub does not have, and these are not asked for again.
"""

import difflib
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from tlspectral.errors import BadWeights
from tlspectral.models.loading.source import PACKAGED, TINY, Source
from tlspectral.models.loading.weight_files import NAMES, indexed_files

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Files of vocabulary. A tokenizer needs one of them; `vocab.json` can also need `merges.txt`."""

SETTINGS = "tokenizer_config.json"
"""How a tokenizer is made of its vocabulary, with its special tokens."""

# The vocabularies come last: an interrupted fetch does not look finished.
_TOKENIZER = (
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    *VOCABULARIES,
)


def hub_source(name: str, revision: str | None, checkpoint: int | None) -> Source:
    """Return the hub model that a name means, one of TransformerLens' short names included. Raises as `find_source`."""
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(os.sep) or "\\" in name:
        raise FileNotFoundError(f"There is no folder or file {name}.")
    if not _HUB_ID.fullmatch(name):
        known = ", ".join((*TINY, *PACKAGED))
        raise ValueError(
            f"{name!r} is neither a path on this machine nor a hub id such as 'EleutherAI/pythia-70m' nor a demo model"
            f" ({known}){_near_demo_model(name)}"
        )
    hub_id = _official_name(name)
    if checkpoint is not None:
        revision = _suite_revision(hub_id, checkpoint)
    return Source("hub", hub_id, revision, {"model": hub_id, "revision": revision})


def _official_name(name: str) -> str:
    """Return the hub id behind one of TransformerLens' short names, such as `gpt2-small`; other names as they are."""
    if "/" in name:
        return name
    from transformer_lens.supported_models import MODEL_ALIASES

    for hub_id, aliases in MODEL_ALIASES.items():
        if name.lower() in (alias.lower() for alias in aliases):
            return hub_id
    return name


def _suite_revision(hub_id: str, checkpoint: int) -> str:
    """Return the hub revision that holds a training step, in the suites that publish them."""
    owner, _, model = hub_id.lower().partition("/")
    if model.startswith("pythia"):
        return f"step{checkpoint}"
    if owner == "stanford-crfm":
        return f"checkpoint-{checkpoint}"
    raise ValueError(
        f"It is not known how {hub_id} names its training steps (only Pythia's and stanford-crfm's are);"
        " give the branch by revision= instead."
    )


def _near_demo_model(name: str) -> str:
    """Return the end of an error's sentence: a hint at the demo model whose name is nearly this one, or a stop."""
    near = difflib.get_close_matches(name.lower(), (*TINY, *PACKAGED), n=1, cutoff=0.7)
    return f"; did you mean the demo model {near[0]!r}?" if near else "."


def pinned(source: Source) -> Source:
    """Return the hub model at one commit: the cached one, if its config.json is cached, else the hub's.

    Raises ValueError if the hub does not give config.json; the message says why.
    """
    config = first_file(source, ["config.json"])
    if config is None:
        raise ValueError(_refusal(source, "config.json", "the repository has no such file, so it is no checkpoint"))
    commit = config.parent.name
    return replace(source, revision=commit, record={**source.record, "commit": commit})


def first_file(source: Source, files: Iterable[str]) -> Path | None:
    """Return the first of these files that is in the cache, else fetch the first that the hub has; else None.

    Raises ValueError if the hub cannot be asked, or does not give the file.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    # The HTTP library, and so the exception of a broken connection, differs between versions of huggingface_hub.
    http_error = cast(type[Exception], HfHubHTTPError.__mro__[1])
    files = list(files)
    cached = next((path for path in (_cached(source, file) for file in files) if isinstance(path, Path)), None)
    if cached is not None:
        return cached
    for file in files:
        try:
            return Path(huggingface_hub.hf_hub_download(source.location, file, revision=source.revision))
        except (OSError, ValueError, http_error) as error:
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                raise ValueError(_refusal(source, file, _reason(source, error))) from error
    return None


def hub_revisions(source: Source) -> list[str]:
    """Return the branches and tags of a hub model; where no hub can be reached, those that its cache has.

    A warning says so if the hub was not switched off by HF_HUB_OFFLINE. Raises ValueError, which says why, if the hub
    does not list them, or cannot be reached and the cache has none.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    http_error = cast(type[Exception], HfHubHTTPError.__mro__[1])  # as in first_file
    try:
        refs = huggingface_hub.HfApi(endpoint=huggingface_hub.constants.ENDPOINT).list_repo_refs(source.location)
    except (OSError, ValueError, http_error) as error:
        reason = _reason(source, error)
        refused = isinstance(error, HfHubHTTPError)  # the hub was reached
        names = [] if refused else _cached_revisions(source.location)
        if not names:
            raise ValueError(f"the revisions of {source.location} are not known: {reason}.") from error
        if not isinstance(error, OfflineModeIsEnabled):
            warnings.warn(
                f"only the revisions of {source.location} in the hub's cache are used, since the hub did not list "
                f"them: {reason}",
                stacklevel=2,
            )
        return names
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))


def _cached_revisions(location: str) -> list[str]:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    refs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=location, repo_type="model") / "refs"
    return [path.relative_to(refs).as_posix() for path in sorted(refs.rglob("*")) if path.is_file()]


def fetch_weights(source: Source, config: Any) -> None:
    """Fetch the weights of a pinned model into the cache, in one format.

    Raises ValueError if the hub does not give them, BadWeights if there are none or the index cannot be used.
    """
    named = getattr(config, "transformers_weights", None)
    files = [named] if named else list(NAMES)
    cached = any(isinstance(_cached(source, file), Path) for file in files)
    path = first_file(source, files)
    if path is None:
        raise BadWeights(
            f"{source.record['model']} has no weights that transformers loads: neither {' nor '.join(files)}"
        )
    for shard in sorted(set(indexed_files(path).values())) if path.suffix == ".json" else ():
        if not isinstance(_cached(source, shard), Path):
            cached = False
            if first_file(source, [shard]) is None:
                raise BadWeights(f"{source.record['model']}: {shard}, which {path.name} names, is not on the hub")
    if not cached:
        first_file(source, ["generation_config.json"])


def fetch_tokenizer(source: Source) -> None:
    """Fetch all tokenizer files of a pinned model into the cache. The hub is not asked if a tokenizer is cached."""
    if _cached(source, SETTINGS) is not None:
        if any(isinstance(_cached(source, file), Path) for file in VOCABULARIES if file != "vocab.json"):
            return
        if isinstance(_cached(source, "vocab.json"), Path) and _cached(source, "merges.txt") is not None:
            return
    for file in _TOKENIZER:
        if _cached(source, file) is None:
            first_file(source, [file])


def _cached(source: Source, file: str) -> Path | Literal["absent"] | None:
    """Return a file's path in the cache, `"absent"` if the cache says that the hub has none, None if it says nothing.

    This reads the disk alone; `hf_hub_download` can use the network even where it is told not to.
    """
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(source.location, file, revision=source.revision)
    return None if cached is None else Path(cached) if isinstance(cached, str) else "absent"


def _refusal(source: Source, file: str, reason: str) -> str:
    name, revision = source.record["model"], source.record["revision"]
    which = f"{name!r} at revision {revision!r}" if revision else f"{name!r}"
    if file == "config.json":
        return (
            f"{which} is not a folder, a .gguf file or a cached hub model, and the hub did not give its {file}:"
            f" {reason}{_near_demo_model(source.location)}"
        )
    return f"{file} of {which} is not in the hub's cache on this machine, and the hub did not give it: {reason}."


def _reason(source: Source, error: Exception) -> str:
    """Return why a file was not fetched and what to do about it, in one line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        return (
            f"the model is gated; accept its licence at {constants.ENDPOINT}/{source.location}, and log in on this"
            " machine by `hf auth login` or the environment variable HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such model on the hub, or it is private; check the name, and log in for a private model by"
            " `hf auth login` or the environment variable HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"there is no revision {source.revision!r} of the model on the hub"
    if isinstance(error, OfflineModeIsEnabled):
        return "offline mode is on (environment variable HF_HUB_OFFLINE)"
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
