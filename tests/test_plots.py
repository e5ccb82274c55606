"""The plots: what is drawn, on which axes, and that it can be told apart without colour."""

from types import SimpleNamespace

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from specnb import plots


def made(drafted, accepted, own=True, row=0):
    """A round of counts: `own` says whether it ends in the target's own token."""
    bonus = own and drafted > 0 and accepted == drafted
    next_token = 9 if own else None
    return SimpleNamespace(row=row, drafted=[1] * drafted, num_accepted=accepted, next_token=next_token, is_bonus=bonus)


TRACE = [made(4, 2), made(4, 4), made(0, 0), made(4, 1, own=False), made(2, 0, row=1)]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def bars(ax):
    """label → heights, from the drawn bars."""
    return {c.get_label(): [bar.get_height() for bar in c] for c in ax.containers}


def test_rounds_are_drawn_with_the_trace_counts():
    ax = plots.plot_rounds(TRACE)
    assert bars(ax) == {
        "accepted": [2, 4, 0, 1],
        "correction": [1, 0, 0, 0],
        "bonus": [0, 1, 0, 0],
        "target, nothing drafted": [0, 0, 1, 0],
        "drafted in vain": [2, 0, 0, 3],
    }
    assert ax.get_title() == "10 tokens in 4 target passes"


def test_parts_of_a_round_differ_without_colour():
    ax = plots.plot_rounds(TRACE)
    hatches = [c.patches[0].get_hatch() or "" for c in ax.containers]
    assert len(set(hatches)) == len(hatches) == 5


def test_row_of_a_batch():
    ax = plots.plot_rounds(TRACE, row=1)
    assert bars(ax) == {"correction": [1], "drafted in vain": [2]}
    with pytest.raises(ValueError, match="row 2"):
        plots.plot_rounds(TRACE, row=2)


def test_pass_cost_marks_the_knee_and_shows_every_curve_in_full():
    ax = plots.plot_pass_cost([1, 2, 4, 8], [10.0, 11.0, 12.5, 20.0], label="float32")
    plots.plot_pass_cost([1, 2, 4, 8], [10.0, 10.0, 10.0, 50.0], ax=ax, label="bfloat16")
    assert [text.get_text() for text in ax.texts] == ["knee: T = 4", "knee: T = 4"]
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] >= 5
    curves = [line for line in ax.lines if len(line.get_xdata()) == 4]
    assert len({line.get_marker() for line in curves}) == 2


def test_pass_cost_in_ms():
    ax = plots.plot_pass_cost([1, 2], [10.0, 30.0], relative=False)
    assert list(ax.lines[0].get_ydata()) == [10.0, 30.0]
    assert ax.get_ylabel() == "ms per pass"


def test_roofline_bends_at_the_ridge():
    ax = plots.plot_roofline({"T = 1": (0.5, 5e9), "T = 64": (32, 9e10)}, bandwidth=20e9, peak_flops=100e9)
    x, y = ax.lines[0].get_data()
    assert y.max() == pytest.approx(100)
    assert y[x < 5] == pytest.approx(20 * x[x < 5])
    assert {"T = 1", "T = 64"} <= {line.get_label() for line in ax.lines}
    with pytest.raises(ValueError, match="bandwidth"):
        plots.plot_roofline({"a": (1, 1)}, bandwidth=0, peak_flops=1)


def test_latency_pairs_prediction_and_measurement():
    ax = plots.plot_latency({"float32": 73, "bfloat16": 42}, {"float32": 26})
    widths = {c.get_label(): [bar.get_width() for bar in c] for c in ax.containers}
    assert widths == {"predicted": [26], "measured": [73, 42]}
    assert ax.containers[0].patches[0].get_hatch() != ax.containers[1].patches[0].get_hatch()


def test_series_differ_by_marker_and_dash():
    ax = plots.plot_series([1, 2], {"a": [1, 2], "b": [2, 1], "c": [0, 0]}, xlabel="k")
    assert len({line.get_marker() for line in ax.lines}) == len({line.get_linestyle() for line in ax.lines}) == 3
    with pytest.raises(ValueError, match="same length"):
        plots.plot_series([1, 2], {"a": [1]})


def test_mask_has_a_dot_where_a_query_may_look():
    ax = plots.plot_mask(torch.ones(2, 3).tril(1).bool(), keys=["a", "b", "c"], queries=["b", "c"])
    assert [text.get_text() for text in ax.texts] == ["●", "●", "", "●", "●", "●"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="two dimensions"):
        plots.plot_mask(torch.ones(1, 2, 3))


def test_cache_marks_held_and_rolled_back():
    ax = plots.plot_cache(torch.tensor([2, 1]), 4, stale=[1, 0])
    assert [text.get_text() for text in ax.texts] == ["●", "●", "×", "", "●", "", "", ""]
    with pytest.raises(ValueError, match="capacity 4"):
        plots.plot_cache([3], 4, stale=[2])


def test_kept_path_moves_together():
    ax = plots.plot_kept(2, 4, [1, 3])
    assert [text.get_text() for text in ax.texts] == ["●", "●", "×", "◆", "×", "◆", "●", "●", "◆", "◆", "", ""]
    with pytest.raises(ValueError, match="a tree of 2"):
        plots.plot_kept(1, 2, [2])


def test_tree_has_its_nodes_by_depth_and_frames_the_path():
    ax = plots.plot_tree([-1, -1, 0, 1, 1], ["a", "b", "c", "d", "e"], path=[1, 4], root="so")
    texts = {text.get_text(): text for text in ax.texts}
    assert {name: text.get_position()[0] for name, text in texts.items()} == dict(so=0, a=1, b=1, c=2, d=2, e=2)
    heights = [texts[name].get_position()[1] for name in "cde"]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 3, "leaves lie one below another"
    assert texts["b"].get_position()[1] == pytest.approx(sum(heights[1:]) / 2)
    framed = {name for name, text in texts.items() if text.get_bbox_patch().get_linewidth() > 1}
    assert framed == {"b", "e"}
    assert sum(line.get_linewidth() > 1 for line in ax.lines) == 2
    assert [text.get_text() for text in plots.plot_tree([-1, 0]).texts] == ["•", "0", "1"]


@pytest.mark.parametrize(
    ("parents", "labels", "message"), [([0], [], "parents come first"), ([-1], ["a", "b"], "same")]
)
def test_a_malformed_tree_is_not_drawn(parents, labels, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_tree(parents, labels)


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plots.plot_rounds(TRACE, ax),
        lambda ax: plots.plot_pass_cost([1, 2], [1.0, 2.0], ax),
        lambda ax: plots.plot_roofline({"a": (1, 1e9)}, 1e9, 1e10, ax),
        lambda ax: plots.plot_latency({"a": 1.0}, ax=ax),
        lambda ax: plots.plot_series([1], {"a": [1]}, ax),
        lambda ax: plots.plot_mask([[1]], ax),
        lambda ax: plots.plot_cache([1], 2, ax),
        lambda ax: plots.plot_kept(1, 2, [1], ax),
        lambda ax: plots.plot_tree([-1], ax=ax),
    ],
)
def test_plots_draw_on_the_axes_they_are_given(draw):
    figure, (left, right) = plt.subplots(1, 2)
    assert draw(right) is right
    assert right.has_data() and not left.has_data()
    assert plt.get_fignums() == [figure.number]


def test_style_is_the_colour_blind_palette():
    with plt.rc_context():
        plots.use_style()
        cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    assert [to_hex(c) for c in cycle[:2]] == ["#0173b2", "#de8f05"]
