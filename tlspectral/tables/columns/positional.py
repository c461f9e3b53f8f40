"""The columns of `positional_symbolic` that no other table has.

d_b is the mean attention of the prompt's last query over the tokens of block b. A swap exchanges blocks i and j;
v = (d_i, d_j) before it and v' after it, at the same places. PS is Urrutia et al., "Decoupling Positional and Symbolic
Attention Behavior in Transformers".
"""

from tlspectral.tables.columns.entry import Column

_SCORE = "weighted mean of cosines"
_ONE_PROMPT = (
    "It describes one prompt. Whether the model does the task the prompt poses is not in it: look at the answer's "
    "probability before calling it a mechanism. "
)

POSITIONAL_COLUMNS: tuple[Column, ...] = (
    Column(
        "s_pos",
        "Positional score: sum over swaps of alpha cos(v', v); 1 where attention stays at the places.",
        _SCORE, "0 .. 1", "PS 3.3, B.3", "positional score",
        _ONE_PROMPT + "Flat attention has both scores near 1: read it beside logit_std.",
    ),
    Column(
        "s_sym",
        "Symbolic score: sum over swaps of alpha cos(v', (d_j, d_i)); 1 where attention moves with the blocks.",
        _SCORE, "0 .. 1", "PS 3.3, B.3", "symbolic score",
        _ONE_PROMPT + "Per swap s_pos^2 + s_sym^2 = 1 + sin 2f sin 2f' with f, f' the angles of v and v': a negative "
        "correlation of the two scores over heads is largely geometry.",
    ),
    Column(
        "exclusion_index",
        "sym / (pos + sym) of Theorem 1, over all tokens before the query: 0 where logits depend on the key's content "
        "alone, 1 where they depend on its place alone.",
        "share", "0 .. 1", "PS 3.2, Theorem 1", "",
        "It needs no swaps and no tau, but keys of one pass: what a position adds to a key in earlier layers counts as "
        "content. Learned absolute positions live there, so such heads have 0.",
    ),
    Column(
        "logit_std",
        "Standard deviation of the query's logits over the tokens before it.",
        "logit", "0 .. inf", "PS 3.2, Theorem 1", "sqrt of Var(lambda)",
        "Nothing by itself: where it is small attention is flat, and both scores are high for that reason.",
    ),
    Column(
        "tau",
        "Temperature of the weights alpha = softmax(|d_i - d_j| / tau) over swaps. PS gives no value.",
        "attention", "0 .. inf", "PS B.3; the default is this package's: 0.1 of the largest |d_i - d_j|", "",
        "Scores at different tau are not comparable: with a large one every swap counts alike.",
    ),
    Column(
        "alpha_ess",
        "Effective number of swaps behind a score: 1 / sum of alpha^2.",
        "swaps", "1 .. swaps", "this package", "effective sample size",
        "Near 1 the score is that of one swap.",
    ),
)  # fmt: skip
"""What `positional_symbolic` adds to `layer`, `head` and `frequency`."""
