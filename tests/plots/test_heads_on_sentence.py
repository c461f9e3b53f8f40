"""The figure of all heads on a sentence: squares, frames and bars where the numbers are, letters that can be read."""

import command_line
import numpy as np
import pytest
import torch
from figure_parts import part, said
from made_up_heads import heads
from made_up_walls import wall as made_up
from matplotlib.text import Text
from zoo import shared

import tlspectral as tls
from tlspectral import plots

IDS = torch.tensor([1, 5, 6, 7, 8, 5, 6, 7])
SITE = 688  # pixels of the site's column


def patches(figure, begins):
    return {one.get_gid(): one for one in figure.findobj(lambda artist: str(artist.get_gid()).startswith(begins))}


def test_a_square_is_the_attention_of_its_head_on_the_scale_of_the_bar():
    one = made_up()
    figure = plots.wall(one, table=heads())
    (image,) = part(figure, "squares")
    pixels, n = np.asarray(image.get_array()), len(one.tokens) - 1
    frames = patches(figure, "frame-")
    side = frames[next(iter(frames))].get_width()
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "attention"]
    assert bar.get_ylim() == (0.0, 0.5)
    for index, name in enumerate(one.heads["name"]):
        (frame,) = [frames[gid] for gid in frames if f"-{name}-" in gid]
        x, y = (round(place + 0.5) for place in frame.get_xy())
        step = side // n
        red = pixels[y + step // 2 : y + side : step, x + step // 2 : x + side : step, 0]
        share = np.minimum(1.0, one.attention[index, 1:, 1:] / 0.5)
        # A scale has 256 colours from #f6f7f9 to #1b5e9b; in layer 1 the column of the second sink is grey.
        expected = (246 + (27 - 246) * share) / 255
        kept = [column for column in range(n) if one.heads["second_sink"][index] != column + 1]
        np.testing.assert_allclose(red[:, kept], expected[:, kept], atol=0.005)
        if len(kept) < n:
            grey = pixels[y + side - 1, x + 2 * step]
            assert np.ptp(grey) < 0.15


def test_frames_are_the_largest_score_and_bars_the_change():
    one, table = made_up(), heads()
    figure = plots.wall(one, table=table)
    frames = patches(figure, "frame-")
    assert len(frames) == 12
    for row in table.to_dict("records"):
        scores = {name: row[name] for name in ("prev", "dup", "ind")}
        best = max(scores, key=scores.__getitem__)
        assert f"frame-{row['name']}-{best if scores[best] >= 0.3 else 'none'}" in frames
    bars = patches(figure, "bar-")
    side = next(iter(frames.values())).get_width()
    for name, delta in zip(one.heads["name"], one.removal.deltas, strict=True):
        width = abs(delta) / 0.6 * side
        if width < 0.5:
            assert f"bar-{name}" not in bars
            continue
        bar = bars[f"bar-{name}"]
        assert bar.get_width() == pytest.approx(width)
        filled = bar.get_facecolor()[:3] != (1.0, 1.0, 1.0)
        assert filled == (delta < 0)
    text = said(figure)
    for words in ("a full bar is 0.60", "the answer gains", "second sink", "share keys and values", ".3 or more",
                  "0.80 with all heads", "One sentence has no standard error", "previous-token: "):  # fmt: skip
        assert words in text, words
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("layer", "head")


@pytest.mark.fast(1)
@pytest.mark.parametrize(("layers", "per_layer", "tokens"), [(3, 4, 5), (30, 9, 15), (64, 8, 60)])
def test_letters_can_be_read_in_the_column_of_the_site(layers, per_layer, tokens):
    figure = plots.wall(made_up(layers, per_layer, [f" word{place}" for place in range(tokens)]))
    figure.draw_without_rendering()
    scale = SITE / (72 * figure.get_figwidth())
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert len(shown) > 8
    assert min(text.get_fontsize() for text in shown) * scale >= 9
    inside = figure.bbox
    for text in shown:
        box = text.get_window_extent()
        assert box.x0 >= -1, text.get_text()
        assert box.x1 <= inside.x1 + 1, text.get_text()
    assert len(part(figure, "squares")) == (2 if layers > 40 else 1)


def test_a_model_is_measured_and_says_the_same_as_its_wall():
    model = shared("bridge", "llama")
    table = tls.detect_heads(model, n_sequences=2)
    figure = plots.wall(model, IDS, table=table)
    measured = tls.hooks.wall(model, IDS)
    again = plots.wall(measured, table=table)
    for one, other in zip(part(figure, "squares"), part(again, "squares"), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_array()), np.asarray(other.get_array()))
    assert patches(figure, "bar-").keys() == patches(again, "bar-").keys()
    assert f"{measured.removal.value:.2f} with all heads" in said(figure)
    bare = plots.wall(model, IDS, table=table, removal=False)
    assert patches(bare, "bar-") == {}
    assert "was left out" in said(bare)


def test_a_task_has_its_error_and_text_is_no_formula():
    one = made_up(task=True, tokens=["<s>", " costs", " $5", " or", " $6_x^2$"])
    figure = plots.wall(one)
    figure.draw_without_rendering()
    assert "0.80 ± 0.02 with all heads" in said(figure)
    assert "mean over 8 prompts" in " ".join(said(figure).split())
    assert "previous-token" not in said(figure)  # no table, no frames
    assert "$6_x^2$" in figure.get_suptitle()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="leave prompt= and task= out"):
        plots.wall(made_up(), "text")
    other = heads()
    other.attrs["revision"] = "other"
    with pytest.raises(ValueError, match="the wall with revision"):
        plots.wall(made_up(), table=other)
    with pytest.raises(ValueError, match="prompt= and task= were both given"):
        plots.wall(shared("bridge", "llama"), IDS, task=tls.logit_difference([IDS.tolist()], 60, 20))


def test_the_command_draws_it(tmp_path):
    path = tmp_path / "wall.png"
    done = command_line.succeed("wall", "tiny-rope", "-o", path, "--no-removal")
    assert done.stdout.strip() == str(path)
    assert path.stat().st_size > 5000
    assert "no tokenizer" in command_line.refusal("wall", "tiny-rope", "--prompt", "a b", "-o", tmp_path / "no.png")
    assert "give only one of them" in command_line.refusal(
        "wall", "tiny-rope", "--prompt", "a", "--task", "t.csv", "-o", tmp_path / "no.png"
    )
