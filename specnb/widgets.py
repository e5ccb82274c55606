"""Things a reader moves: a replay of rounds, plots with sliders, a quiz. Each has a static twin.

Every widget here displays as one bundle: the live view for a notebook with a kernel, and beside it a picture or
plain HTML with the same content, for readers on GitHub, in a printed page or without a kernel. The twins use no
script, no style sheet and no colour to say anything. The replay and the quiz keep their state in the page, so they
work while the kernel is busy or gone.

Needs the `lab` extra (ipywidgets, anywidget, matplotlib); `import specnb` does not load this module.
"""

from __future__ import annotations

import base64
import html
import io
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import matplotlib.pyplot as plt
import traitlets

_STATIC = Path(__file__).parent / "static"

# kind of token → (mark, HTML tag of the twin, meaning). The tags survive where styles are stripped.
KINDS = {
    "accepted": ("✓", "span", "accepted"),
    "rejected": ("✗", "del", "rejected"),
    "unused": ("○", "del", "dropped with it"),
    "correction": ("↻", "ins", "correction (target)"),
    "bonus": ("★", "strong", "bonus (target)"),
    "plain": ("→", "ins", "target, nothing drafted"),
}
_WRITTEN = ("accepted", "correction", "bonus", "plain")
_LETTERS = string.ascii_uppercase  # written out in the quiz's twin, since pages strip the type of a list
_PROMPT_CHARS = 400  # of a long prompt only the end is shown


# ------------------------------------------------------------------------------------- from token ids to words


def _speller(tokenizer: Any, words: Sequence[str] | Mapping[int, str] | None) -> Callable[[list, Any], str]:
    """A function (context, token) → what the token adds to the text after that context."""
    if tokenizer is not None and words is not None:
        raise ValueError("Give a tokenizer or words, not both: each says how a token is written.")
    if tokenizer is not None:
        return lambda context, token: _piece(tokenizer, context, token)
    return lambda context, token: _word(words, token)


def _piece(tokenizer: Any, context: Sequence[int], token: int) -> str:
    """Decode one token in its context, since bytes of one character may be spread over several tokens.

    A token that ends inside a character adds nothing; the one that completes it adds the whole character. A few
    tokens of context are enough: a character has at most four bytes.
    """
    window = [int(t) for t in context[-8:]]
    before = _decode(tokenizer, window).rstrip("\ufffd")
    after = _decode(tokenizer, [*window, int(token)]).rstrip("\ufffd")
    return after[len(before) :]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def _word(words: Sequence[str] | Mapping[int, str] | None, token: Any) -> str:
    """A scripted lesson's token: one word, with a space before it unless it is punctuation."""
    try:
        word = str(token) if words is None or isinstance(token, str) else words[int(token)]
    except (KeyError, IndexError):
        raise ValueError(f"Token {token} has no word: `words` must name every id of the trace.") from None
    return word if word[:1] in (*string.punctuation, " ", "\n", "") else f" {word}"


def _label(text: str) -> str:
    """A token as it is shown by itself: newlines, tabs and bare spaces made visible, half characters marked."""
    if not text:
        return "▯"
    if not text.strip(" "):
        return "␣" * len(text)
    return text.replace("\n", "⏎").replace("\t", "⇥")


# -------------------------------------------------------------------------------------------- rounds to display


def _rounds_of_row(out_or_trace: Any, row: int) -> list:
    """The trace of one row, from an output of `generate` or from a list of rounds."""
    trace = getattr(out_or_trace, "trace", out_or_trace)
    if not trace:
        raise ValueError("There is no trace to replay: generate with return_trace=True, or pass a list of rounds.")
    rounds = [r for r in trace if getattr(r, "row", 0) == row]
    if not rounds:
        rows = sorted({r.row for r in trace})
        raise ValueError(f"The trace has no round of row {row}; it holds the rows {rows}. Choose one with row=.")
    for number, one in enumerate(rounds, 1):
        _check_round(number, one)
    return rounds


def _check_round(number: int, one: Any) -> None:
    missing = [name for name in ("drafted", "num_accepted", "next_token", "is_bonus") if not hasattr(one, name)]
    if missing:
        raise TypeError(f"Round {number} is a {type(one).__name__} without {missing}; a round has these attributes.")
    if not 0 <= one.num_accepted <= len(one.drafted):
        raise ValueError(f"Round {number} accepts {one.num_accepted} of {len(one.drafted)} drafted tokens.")
    if one.is_bonus and one.num_accepted < len(one.drafted):
        raise ValueError(f"Round {number} has a bonus token after a rejection; only a full acceptance earns one.")


def _draft_kind(one: Any, place: int) -> str:
    """Behind the accepted block stands the rejected token; where the row ended inside the block there is none."""
    if place < one.num_accepted:
        return "accepted"
    return "rejected" if place == one.num_accepted and one.next_token is not None else "unused"


def _own_kind(one: Any) -> str:
    if not len(one.drafted):
        return "plain"
    return "bonus" if one.is_bonus else "correction"


def _steps(rounds: Iterable[Any], context: list, spell: Callable[[list, Any], str]) -> list[dict]:
    """One dict per round, ready for the page: its tokens, and how many are written after it."""
    steps, written = [], 0
    for one in rounds:
        tokens = _drafted_tokens(one, context, spell)
        context = context + list(one.drafted[: one.num_accepted])
        if one.next_token is not None:
            tokens.append(_token(spell(context, one.next_token), _own_kind(one)))
            context.append(one.next_token)
        written += sum(token["kind"] in _WRITTEN for token in tokens)
        steps.append({"tokens": tokens, "written": written})
    return steps


def _drafted_tokens(one: Any, context: list, spell: Callable[[list, Any], str]) -> list[dict]:
    drafted = list(one.drafted)
    texts = [spell(context + drafted[:place], token) for place, token in enumerate(drafted)]
    return [_token(text, _draft_kind(one, place)) for place, text in enumerate(texts)]


def _token(text: str, kind: str) -> dict:
    return {"text": text, "label": _label(text), "kind": kind}


def _prompt_ids(out_or_trace: Any, prompt_ids: Any, row: int, tokenizer: Any) -> list:
    """The prompt's ids: as given, or the part of the output's sequences before the new tokens."""
    if prompt_ids is not None:
        ids = prompt_ids[row] if getattr(prompt_ids, "ndim", 1) == 2 else prompt_ids
        return [int(t) for t in ids]
    if not hasattr(out_or_trace, "sequences"):
        return []
    sequences = out_or_trace.sequences
    ids = sequences[row, : sequences.shape[1] - int(out_or_trace.num_new_tokens.max())].tolist()
    return _without_padding(ids, getattr(tokenizer, "pad_token_id", None)) if len(sequences) > 1 else ids


def _without_padding(ids: list[int], pad: int | None) -> list[int]:
    start = next((i for i, token in enumerate(ids) if token != pad), len(ids))
    return ids[start:]


def replay(
    out_or_trace: Any,
    tokenizer: Any = None,
    prompt_ids: Any = None,
    words: Sequence[str] | Mapping[int, str] | None = None,
    *,
    prompt: str | None = None,
    row: int = 0,
) -> Replay:
    """A replay of the rounds of one row.

    Args:
        out_or_trace: what `generate(..., return_trace=True)` returned, or a list of rounds.
        tokenizer: spells the token ids of a real model.
        prompt_ids: ids before the first round, [prompt] or [B, prompt]; read from the output where there is one.
        words: for scripted lessons, the word of each id (list or mapping).
        prompt: the text before the first round, instead of `prompt_ids`.
        row: which row of a batch.
    """
    spell = _speller(tokenizer, words)
    context = _prompt_ids(out_or_trace, prompt_ids, row, tokenizer)
    steps = _steps(_rounds_of_row(out_or_trace, row), context, spell)
    if prompt is None:
        prompt = _decode(tokenizer, context) if tokenizer else "".join(spell([], t) for t in context).lstrip()
    return Replay(steps=steps, prompt=prompt)


class Replay(anywidget.AnyWidget):
    """Step through the rounds of a generation. `index` rounds are shown: 0 is the prompt alone.

    Build it with `replay`. Buttons, slider or keys (← → Home End) step; `index` follows in Python.
    """

    _esm = _STATIC / "replay.js"
    _css = _STATIC / "replay.css"
    steps = traitlets.List(traitlets.Dict()).tag(sync=True)
    prompt = traitlets.Unicode().tag(sync=True)
    kinds = traitlets.Dict().tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)

    def __init__(self, steps: list[dict], prompt: str = "", index: int = 1) -> None:
        shown = prompt if len(prompt) <= _PROMPT_CHARS else "… " + prompt[-_PROMPT_CHARS:]
        legend = {kind: [mark, meaning] for kind, (mark, _, meaning) in KINDS.items()}
        super().__init__(steps=steps, prompt=shown, kinds=legend, index=index)

    @traitlets.validate("index")
    def _check_index(self, proposal: dict) -> int:
        if not 0 <= proposal["value"] <= len(self.steps):
            raise traitlets.TraitError(
                f"index {proposal['value']}: there are {len(self.steps)} rounds, 0 is the prompt."
            )
        return proposal["value"]

    def text(self, index: int | None = None) -> str:
        """The text after `index` rounds (all of them by default), without the prompt."""
        shown = self.steps[: len(self.steps) if index is None else index]
        return "".join(t["text"] for step in shown for t in step["tokens"] if t["kind"] in _WRITTEN)

    def __repr__(self) -> str:
        lines = [f"round {n}: " + " ".join(_plain(t) for t in step["tokens"]) for n, step in enumerate(self.steps, 1)]
        return "\n".join([f"{self.prompt} …", *lines, _counters(self.steps), "Marks: " + _legend(self._kinds_used())])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return _bundle(super()._repr_mimebundle_(**kwargs), {"text/plain": repr(self), "text/html": self._twin()})

    def _kinds_used(self) -> list[str]:
        used = {token["kind"] for step in self.steps for token in step["tokens"]}
        return [kind for kind in KINDS if kind in used]

    def _twin(self) -> str:
        """All rounds as the rows of a table."""
        rows = "".join(_twin_row(number, step) for number, step in enumerate(self.steps, 1))
        return (
            f"<p>{_broken(self.prompt)} …</p><table><thead><tr><th>round</th><th>draft, and what the target made of it"
            f"</th><th>tokens so far</th></tr></thead><tbody>{rows}</tbody></table>"
            f"<p>Written: {_broken(self.text().lstrip())}</p>"
            f"<p>{_counters(self.steps)} Marks: {_legend(self._kinds_used())}</p>"
        )


def _plain(token: dict) -> str:
    mark, tag, _ = KINDS[token["kind"]]
    label = token["label"].strip()
    return f"[{label}]{mark}" if tag == "del" else f"{label}{mark}"


def _twin_row(number: int, step: dict) -> str:
    tokens = " ".join(_twin_token(token) for token in step["tokens"])
    return f'<tr><th scope="row">{number}</th><td>{tokens}</td><td>{step["written"]}</td></tr>'


def _twin_token(token: dict) -> str:
    mark, tag, _ = KINDS[token["kind"]]
    return f"<{tag}><code>{html.escape(token['label'])}</code></{tag}>{mark}"


def _counters(steps: Sequence[dict]) -> str:
    written, passes = steps[-1]["written"], len(steps)
    return f"{written} tokens in {passes} target passes: {written / passes:.2f} tokens per pass."


def _legend(kinds: Iterable[str]) -> str:
    return ", ".join(f"{KINDS[kind][0]} {KINDS[kind][2]}" for kind in kinds)


def _broken(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _bundle(live: Any, twin: dict[str, Any]) -> dict[str, Any]:
    """The live view with its twin beside it; a front end shows the first of them that it can."""
    data = live[0] if isinstance(live, tuple) else live
    return {**(data or {}), **twin}


# --------------------------------------------------------------------------------------------------- sliders


class Picture(anywidget.AnyWidget):
    """An image with its description for screen readers; a new one replaces it without a flicker."""

    _esm = _STATIC / "picture.js"
    _css = _STATIC / "picture.css"
    png = traitlets.Bytes().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    error = traitlets.Unicode().tag(sync=True)


class _Interactive(ipywidgets.VBox):
    """Controls above a view that is made anew from their values. A failing redraw says so under the controls."""

    def __init__(self, controls: Mapping[str, Any], view: ipywidgets.Widget) -> None:
        if not controls:
            raise ValueError("Give at least one control, for example k=(1, 16).")
        self.controls = {name: _control(name, given) for name, given in controls.items()}
        super().__init__([*self.controls.values(), view])
        for control in self.controls.values():
            control.observe(self._redraw, names="value")

    @property
    def values(self) -> dict[str, Any]:
        """The parameters as the controls stand."""
        return {name: control.value for name, control in self.controls.items()}

    def _redraw(self, change: Any = None) -> None:
        raise NotImplementedError


class InteractiveFigure(_Interactive):
    """A plot that follows its controls; its twin is a picture of chosen values. Build it with `interactive_figure`."""

    def __init__(self, draw: Callable, controls: Mapping, static: Sequence[Mapping], figsize: tuple, alt: Any) -> None:
        self._draw, self._figsize, self._alt = draw, figsize, alt
        self.picture = Picture()
        super().__init__(controls, self.picture)
        self._static = [self.values | dict(one) for one in static or [{}]]
        _check_names(self._static, self.controls)
        self.picture.png = self._png([self.values])
        self.picture.alt = self._description(self.values)

    def _redraw(self, change: Any = None) -> None:
        values = self.values
        try:
            with self.picture.hold_sync():
                self.picture.png, self.picture.error = self._png([values]), ""
                self.picture.alt = self._description(values)
        except Exception as error:  # raised in a callback it would reach no reader
            self.picture.error = f"{type(error).__name__}: {error}"

    def _png(self, panels: Sequence[Mapping[str, Any]]) -> bytes:
        """Draw each set of values in a panel of its own; several panels are titled with their values."""
        columns = min(len(panels), 3)
        rows = math.ceil(len(panels) / columns)
        width, height = self._figsize if len(panels) == 1 else (4.2 * columns, 3.4 * rows)
        figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        try:
            for ax, values in zip(axes.flat, panels, strict=False):
                self._draw_panel(ax, values, titled=len(panels) > 1)
            for ax in axes.flat[len(panels) :]:
                ax.set_axis_off()
            return _png(figure)
        finally:
            plt.close(figure)

    def _draw_panel(self, ax: Any, values: Mapping[str, Any], titled: bool) -> None:
        plt.sca(ax)  # a draw function that says plt.title(…) means this panel
        self._draw(ax, **values)
        if titled:
            ax.set_title(_named(values, self.controls))

    def _description(self, values: Mapping[str, Any]) -> str:
        described = self._alt(**values) if callable(self._alt) else self._alt
        return f"{described or 'Plot'} ({_named(values, self.controls)})"

    def __repr__(self) -> str:
        return "; ".join(self._description(values) for values in self._static)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        png = base64.b64encode(self._png(self._static)).decode()
        return _bundle(super()._repr_mimebundle_(**kwargs), {"text/plain": repr(self), "image/png": png})


class InteractiveHTML(_Interactive):
    """HTML that follows its controls; its twin is the HTML of the starting values. Build it with `interactive_html`."""

    def __init__(self, render: Callable[..., str], controls: Mapping[str, Any]) -> None:
        self._render = render
        self._view = ipywidgets.HTML()
        super().__init__(controls, self._view)
        self._view.value = self._start = render(**self.values)
        self._start_values = self.values

    def _redraw(self, change: Any = None) -> None:
        try:
            self._view.value = self._render(**self.values)
        except Exception as error:  # raised in a callback it would reach no reader
            self._view.value = f'<p role="alert">{type(error).__name__}: {html.escape(str(error))}</p>'

    def __repr__(self) -> str:
        return f"Interactive text ({_named(self._start_values, self.controls)})"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        twin = f"{self._start}<p>({html.escape(_named(self._start_values, self.controls))})</p>"
        return _bundle(super()._repr_mimebundle_(**kwargs), {"text/plain": repr(self), "text/html": twin})


def interactive_figure(
    draw: Callable[..., Any],
    *,
    static: Sequence[Mapping[str, Any]] = (),
    figsize: tuple[float, float] = (7.0, 3.6),
    alt: str | Callable[..., str] = "",
    **controls: Any,
) -> InteractiveFigure:
    """A plot with sliders: `draw(ax, **values)` draws on the axes it is given.

    Args:
        draw: draws one picture; called again whenever a control moves.
        static: sets of values for the stored picture, one panel each (those left out stand at their start); by
            default one panel of the starting values.
        figsize: inches of the live picture and of a single stored panel.
        alt: what the plot shows, for screen readers and text; a string or `alt(**values) -> str`.
        controls: one per parameter of `draw`: `(low, high)`, `(low, high, step)`, a list of choices, a bool, or any
            ipywidgets control, which can also set the start and a longer description.

    Display it as the last line of a cell.
    """
    return InteractiveFigure(draw, controls, static, figsize, alt)


def interactive_html(render: Callable[..., str], **controls: Any) -> InteractiveHTML:
    """HTML with sliders: `render(**values)` returns it; controls as in `interactive_figure`."""
    return InteractiveHTML(render, controls)


def _control(name: str, given: Any) -> ipywidgets.Widget:
    """A control from ipywidgets' shorthand, named like its parameter and wide enough to read."""
    control = given if isinstance(given, ipywidgets.Widget) else ipywidgets.interactive.widget_from_abbrev(given)
    if control is None or not hasattr(control, "value"):
        raise ValueError(f"{name}={given!r} makes no control; give (low, high), (low, high, step), a list or a widget.")
    control.description = control.description or name
    control.style.description_width = "initial"
    control.layout.width = control.layout.width or "min(28rem, 100%)"
    return control


def _check_names(static: Iterable[Mapping[str, Any]], controls: Mapping[str, Any]) -> None:
    unknown = sorted({name for values in static for name in values} - set(controls))
    if unknown:
        raise ValueError(f"static names {unknown}, which are no controls; there are {sorted(controls)}.")


def _named(values: Mapping[str, Any], controls: Mapping[str, Any]) -> str:
    shown = {name: f"{v:.3g}" if isinstance(v, float) else str(v) for name, v in values.items()}
    return ", ".join(f"{controls[name].description} = {value}" for name, value in shown.items())


def _png(figure: Any) -> bytes:
    """PNG bytes that are the same for the same picture: no version of the plotting library inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------ quiz


def quiz(
    question: str, options: Sequence[str], answer: int | str, why: str, hints: Sequence[str] | None = None
) -> Quiz:
    """A multiple-choice question with feedback.

    Args:
        question: one question; text between backticks is set as code, here and in the other texts.
        options: two or more answers, shown in this order.
        answer: the right one, by its place (from 0) or its text.
        why: shown with the right answer.
        hints: one per option, shown when that (wrong) option is chosen.
    """
    return Quiz(question, options, answer, why, hints)


class Quiz(anywidget.AnyWidget):
    """A question with options. The live view answers a click; the twin folds the answer away. See `quiz`."""

    _esm = _STATIC / "quiz.js"
    _css = _STATIC / "quiz.css"
    question = traitlets.Unicode().tag(sync=True)
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)
    answer = traitlets.Int().tag(sync=True)
    why = traitlets.Unicode().tag(sync=True)
    hints = traitlets.List(traitlets.Unicode()).tag(sync=True)
    chosen = traitlets.Int(-1).tag(sync=True)

    def __init__(
        self, question: str, options: Sequence[str], answer: int | str, why: str, hints: Sequence[str] | None = None
    ) -> None:
        options = list(options)
        _check_options(options, hints)
        place = _place(options, answer)
        super().__init__(question=question, options=options, answer=place, why=why, hints=list(hints or []))

    def __repr__(self) -> str:
        options = [f"  {letter}. {option}" for letter, option in zip(_LETTERS, self.options, strict=False)]
        return "\n".join([self.question, *options])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return _bundle(super()._repr_mimebundle_(**kwargs), {"text/plain": repr(self), "text/html": self._twin()})

    def _twin(self) -> str:
        options = [f"{letter}. {_inline(option)}" for letter, option in zip(_LETTERS, self.options, strict=False)]
        return (
            f"<p><strong>{_inline(self.question)}</strong></p><p>{'<br>'.join(options)}</p>"
            f"<details><summary>Answer</summary><p>{options[self.answer]}</p>"
            f"<p>{_inline(self.why)}</p></details>"
        )


def _check_options(options: list[str], hints: Sequence[str] | None) -> None:
    if not 2 <= len(options) <= len(_LETTERS) or len(set(options)) < len(options):
        raise ValueError(f"A quiz needs two or more different options, got {options}.")
    if hints is not None and len(hints) != len(options):
        raise ValueError(f"Give one hint per option: {len(options)} options, {len(hints)} hints.")


def _place(options: list[str], answer: int | str) -> int:
    place = options.index(answer) if answer in options else answer
    if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(options):
        raise ValueError(
            f"answer={answer!r} is none of the options; give its place, 0 to {len(options) - 1}, or its text."
        )
    return place


def _inline(text: str) -> str:
    """Escaped, with `backticks` as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
