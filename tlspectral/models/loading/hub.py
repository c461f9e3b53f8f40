"""Download files of hub models that the hub's cache on this machine lacks.

huggingface_hub notes in the cache which files the hub does not have; these are not requested again.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlspectral.errors import BadWeights, did_you_mean
from tlspectral.models.loaders import TINY, Source
from tlspectral.models.loading.finding import PACKAGED
from tlspectral.models.loading.weight_files import ADAPTER_CONFIG, indexed_files, weight_names

VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Files with a vocabulary. A tokenizer needs one such file."""

SETTINGS = "tokenizer_config.json"
"""File with the settings and special tokens of a tokenizer."""

# The vocabularies come last: an interrupted fetch does not look finished.
_BESIDE = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt")


def pinned(source: Source) -> tuple[Source, Path]:
    """Return (new `Source` with the commit as revision, folder of that commit in the cache) for the hub model `source`.

    It is the cached commit if config.json is cached, otherwise the hub's; then config.json is downloaded. Raises
    ValueError, with the reason, if the hub does not give config.json.
    """
    config = first_file(source, ["config.json"])
    if config is None:
        if first_file(source, [ADAPTER_CONFIG]) is not None:
            raise ValueError(
                f"{source.record['model']!r} on the hub is an adapter (it has {ADAPTER_CONFIG} and no config.json). "
                "Adapters are loaded from folders: fetch it by huggingface_hub.snapshot_download, and give its folder."
            )
        raise ValueError(_refusal(source, "config.json", "the repository has no such file, so it is no checkpoint"))
    commit = config.parent.name
    return replace(source, revision=commit, record={**source.record, "commit": commit}), config.parent


def first_file(source: Source, files: Iterable[str]) -> Path | None:
    """Return the path of the first of these files that is in the cache; otherwise download the first that the hub has.

    files: names of files of the hub model `source`. None if the hub has none of these files. Raises ValueError if the
    hub cannot be reached or refuses the file.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    in_cache = {file: _cached(source, file) for file in files}
    for path in in_cache.values():
        if isinstance(path, str):
            return Path(path)
    for file in (file for file, path in in_cache.items() if path is None):
        try:
            return Path(huggingface_hub.hf_hub_download(source.location, file, revision=source.revision))
        except Exception as error:  # the HTTP library raises its own error for a broken connection
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                raise ValueError(_refusal(source, file, _reason(source, error))) from error
    return None


def fetch_weights(source: Source, config: Any) -> None:
    """Download the weights of the hub model `source` into the cache, in one format. config: the model's config of
    transformers.

    Raises ValueError if the hub does not give the files, BadWeights if there are none or their index is damaged.
    """
    name, files = source.record["model"], weight_names(config)
    is_cached = any(isinstance(_cached(source, file), str) for file in files)
    path = first_file(source, files)
    if path is None:
        raise BadWeights(
            f"{name} has no weights that transformers loads: neither {' nor '.join(files)}. Give a revision= that has "
            "them, or take another model"
        )
    shards = sorted(set(indexed_files(path).values())) if path.suffix == ".json" else []
    is_cached = is_cached and all(isinstance(_cached(source, shard), str) for shard in shards)
    for shard in shards:
        if first_file(source, [shard]) is None:
            raise BadWeights(
                f"{name}: {shard}, which {path.name} names, is not on the hub; give another revision=, or tell the "
                "owner"
            )
    if not is_cached:
        first_file(source, ["generation_config.json"])


def fetch_tokenizer(source: Source) -> None:
    """Download all tokenizer files of the hub model `source`, fixed to one commit, into the cache, unless a tokenizer
    is cached already.
    """
    if _cached(source, SETTINGS) is None or not any(isinstance(_cached(source, file), str) for file in VOCABULARIES):
        for file in (*_BESIDE, *VOCABULARIES):
            first_file(source, [file])


def _cached(source: Source, file: str) -> Any:
    """Return the path (str) of `file` of the hub model `source` in the cache; None if the file is not in the cache.

    Another object, which is not a string, is returned if the hub is known to have no such file. Nothing is downloaded.
    """
    import huggingface_hub

    return huggingface_hub.try_to_load_from_cache(source.location, file, revision=source.revision)


def _refusal(source: Source, file: str, reason: str) -> str:
    """Return the text of an error: the hub did not give this file of a model.

    source: the model. file: name of the file. reason: why, as text.
    """
    name, revision = source.record["model"], source.record["revision"]
    which = f"{name!r} at revision {revision!r}" if revision else f"{name!r}"
    if file == "config.json":
        demos = "" if "/" in name else f"a demo model ({', '.join((*TINY, *PACKAGED))}), "
        return (
            f"{which} is not {demos}a folder, a .gguf file or a cached hub model, and the hub did not give its {file}:"
            f" {reason}{did_you_mean(source.location, (*TINY, *PACKAGED)) or '.'}"
        )
    return f"{file} of {which} is not in the hub's cache on this machine, and the hub did not give it: {reason}."


def _reason(source: Source, error: Exception) -> str:
    """Return one line of text: why a file of the hub model `source` was not downloaded, and what to do.

    error: what huggingface_hub raised.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"the model is gated; accept its licence at {constants.ENDPOINT}/{source.location}, and log in on this"
            " machine by `hf auth login` or the environment variable HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no branch, tag or commit {source.revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{constants.ENDPOINT} has no repository of this name that this machine may see; a private one needs `hf "
            "auth login` or the environment variable HF_TOKEN"
        )
    cause = (error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split()).rstrip('.')}"
