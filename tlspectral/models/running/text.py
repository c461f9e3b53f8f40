"""Rows of tokens cut from text (the packaged book, documents or a data set), and tokens as text."""

import codecs
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.errors.settings import counted, require_path
from tlspectral.models.reading.view import AttentionView

_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
NEWLINE = re.compile(r"\r\n?|\n")
_ROWS_READ = 2_000
_PART, _BOX = "\N{REPLACEMENT CHARACTER}", "\N{WHITE RECTANGLE}"  # a part of a letter, as decoded and as shown


def packaged_text() -> str:
    """Return *Alice's Adventures in Wonderland* (Carroll, 1865) as one string: 143 kB, public domain.

    Models have seen it in training, so a loss on it is not a held-out loss. Source: `data/text/NOTICE.md`.
    """
    return (files("tlspectral") / "data" / "text" / "alice.txt").read_text(encoding="utf-8")


def packaged_words(kind: Literal["names", "colours", "nouns"]) -> list[str]:
    """Return the packaged words of a kind as a list of single words: first names ("names"), "colours" or common
    "nouns".

    kind: which list. Source: `data/binding/NOTICE.md`.
    """
    return (files("tlspectral") / "data" / "binding" / f"{kind}.txt").read_text(encoding="ascii").split()


def file_text(path: str | os.PathLike[str]) -> str:
    """Return the text of the UTF-8 file `path`, with or without a byte order mark.

    Raises ValueError for another encoding or a binary file, OSError for a file that cannot be read.
    """
    require_path("path", path)
    file = Path(path).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"{path} does not exist: check the name")
    if file.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file in it")
    content = file.read_bytes()
    problem = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, problem = "", problem or f"byte 0x{content[error.start]:02x} at position {error.start}"
    if "\0" in text:
        problem = f"byte 0x00 at position {content.index(0)}"
    if problem is not None:
        raise ValueError(f"{path} is not a text file in UTF-8: found {problem}; save it as UTF-8 text")
    return text


def file_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of the UTF-8 file `path`. Only newlines end a line; other separators, such as U+2028, stay in
    the text.

    Raises ValueError for another encoding or a binary file, OSError for a file that cannot be read.
    """
    return NEWLINE.split(file_text(path))


def text_tokens(
    view: AttentionView, text: str | Sequence[str] | None, *, n_sequences: int, sequence_length: int
) -> Int[Tensor, "sequences pos"]:
    """Return text as rows of token ids. Each row begins with BOS (else EOS, else 0); EOS separates documents.

    Rows are cut one after another from the joined documents. An incomplete last row is dropped unless it is the only
    row.

    Args:
        view: view of a model that has a tokenizer.
        text: a document, a list of documents, or the name of a data set (one word such as `NeelNanda/pile-10k`; the
            column `text` of its split `train` is streamed). None: the packaged book, *Alice's Adventures in
            Wonderland*.
        n_sequences: largest number of rows.
        sequence_length: tokens in a row, BOS included; at most the context is used.

    Raises:
        ValueError: the model has no tokenizer, the text has no token, or `text` is not text.
        ImportError: a data set is named and `datasets` is not installed.
    """
    tokenizer = getattr(view.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so text cannot be read: pass token ids, [sequences, pos]")
    documents = _documents(text)
    n_sequences = counted(n_sequences, 1, "n_sequences is how many rows are cut from text")
    sequence_length = counted(sequence_length, 2, "sequence_length is how many tokens a row has")
    width = min(sequence_length, view.n_ctx) - 1
    separator = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids: list[int] = []
    for document in documents:
        ids += (separator if ids else []) + list(tokenizer(document, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) >= n_sequences * width:
            break
    if not ids:
        raise ValueError("the text has no token: give text that is not empty")
    rows = max(1, min(n_sequences, len(ids) // width))
    body = torch.tensor(ids[: rows * width]).view(rows, -1)
    return torch.cat([torch.full((rows, 1), view.start_token), body], dim=1)


def token_text(view: AttentionView, token: int) -> str:
    """Return the id `token` as text, by the tokenizer of the model in `view`; the id itself, as text, without a
    tokenizer or outside its vocabulary.
    """
    return tokens_text(view, [token])


def tokens_text(view: AttentionView, tokens: list[int]) -> str:
    """Return the ids `tokens` as one text, special tokens included; the ids as text if they cannot be decoded.

    view: the model, with the tokenizer. Ids cannot be decoded without a tokenizer, outside its vocabulary, or if the
    user's tokenizer lacks `__len__` or `decode`.
    """
    tokenizer: Any = getattr(view.model, "tokenizer", None)
    if not (hasattr(tokenizer, "__len__") and hasattr(tokenizer, "decode")) or max(tokens) >= len(tokenizer):
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(tokens))


def texts_in_a_row(view: AttentionView, tokens: list[int]) -> list[str]:
    """Return a list with the text of each id in `tokens`, so that all texts joined are the text of the sentence.

    view: the model, with the tokenizer. A token that holds part of a letter (of an emoji, for example) is shown as a
    box. The last token of such a letter is shown as the letter.
    """
    texts, before = [], ""
    for index, token in enumerate(tokens):
        whole = tokens_text(view, tokens[: index + 1])
        alone = token_text(view, token)
        if whole.endswith(_PART) and alone.endswith(_PART):
            texts.append(_BOX)
            continue
        # Decoding may tidy up what stands in front of a token: then it is read alone.
        texts.append(whole[len(before) :] if whole.startswith(before) and len(whole) > len(before) else alone)
        before = whole
    return texts


def _documents(text: Any) -> Iterable[str]:
    """Return the documents of the user's argument `text` as a list of strings.

    text: None (the packaged book), a document, a list of documents, or the name of a data set (up to 2,000 rows are
    read). Raises ValueError for anything that is not text.
    """
    if text is None:
        return [packaged_text()]
    if not isinstance(text, str):
        # A tokenizer returns a mapping, whose keys would be read as documents.
        documents: list[Any] = [text] if isinstance(text, Mapping) else list(text)
        strange = [type(document).__name__ for document in documents if not isinstance(document, str)]
        if strange:
            raise ValueError(
                f"text is a string or a list of strings; found {strange[0]}. Give token ids as a tensor "
                "[sequences, pos], with attention_mask= where they are padded"
            )
        return documents
    if not _DATASET.fullmatch(text):
        return [text]
    from datasets import load_dataset

    return [row["text"] for row in islice(load_dataset(text, split="train", streaming=True), _ROWS_READ)]
