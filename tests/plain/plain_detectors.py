"""Scores of `detect_heads` from kept patterns, query by query, as the specification reads."""

import numpy as np
from ablation_runs import recorded


def kept_patterns(model, tokens):
    """Patterns of all layers, [sequence, head, query, key], from one run that keeps everything."""
    return [pattern.double().numpy() for pattern in recorded(model, ("pattern",), tokens).values()]


def marked_keys(row, *, prompts=False, causal=True):
    """The keys of every query that counts, by score: of ids that are a prompt, or `[BOS, r, r]`."""
    if prompts:
        queries = range(2, len(row))
        duplicates = {query: [key for key in range(query) if row[key] == row[query]] for query in queries}
        followed = {q: [key for key in range(1, q) if row[key - 1] == row[q]] for q in queries}
        return {
            "prev": {q: [q - 1] for q in queries},
            "dup": duplicates,
            "ind": followed,
            "self": {q: [q] for q in queries},
        }
    length = (len(row) - 1) // 2
    copy, segment = range(length + 1, 2 * length + 1), range(2, length + 1)
    wanted = {"prev": (copy, 1), "dup": (copy, length), "ind": (copy, length - 1), "prev_first": (segment, 1)}
    wanted |= {} if causal else {"next": (copy[:-1], -1)}
    return {score: {query: [query - back] for query in queries} for score, (queries, back) in wanted.items()}


def largest_on(pattern, keys_of):
    """Share of queries whose largest attention is on a marked key, ties shared out, of a pattern [head, query, key]."""
    shares = []
    for head in pattern:
        hits = []
        for query, keys in keys_of.items():
            top = [key for key, value in enumerate(head[query]) if value == head[query].max()]
            hits += [sum(key in keys for key in top) / len(top)] if keys else []
        shares.append(np.mean(hits))
    return np.array(shares)


def scores_of(pattern, marked):
    """Mean attention of queries to their keys, of a pattern [..., query, key]; NaN where no query has a key."""
    scores = {}
    for score, keys_of in marked.items():
        by_query = [pattern[..., query, keys].sum(-1) for query, keys in keys_of.items() if keys]
        scores[score] = np.mean(by_query, axis=0) if by_query else np.full(pattern.shape[:-2], np.nan)
    return scores
