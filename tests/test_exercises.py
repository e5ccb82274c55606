"""The exercises' checks: right answers pass, each named slip gets its own message, stubs are not an error."""

import html
import re

import pytest
import torch

from specnb import exercises
from specnb.exercises import CheckResult, Exercise

EXERCISES = [value for value in vars(exercises).values() if isinstance(value, Exercise)]
SLIPS = [(exercise, slip) for exercise in EXERCISES for slip in exercise.slips]


def check_of(exercise):
    return getattr(exercises, f"check_{exercise.name}")


# Answers as a learner would write them, apart from the solutions inside the checks.


def count_passes(num_new_tokens, accepted_per_round):
    left, rounds = num_new_tokens, iter(accepted_per_round)
    passes = 0
    while left > 0:
        left -= 1 + next(rounds)
        passes += 1
    return passes


def causal_mask(T, past):
    return torch.ones(T, past + T, dtype=torch.bool).tril(diagonal=past)


def knee(positions, ms, tolerance=1.25):
    best = positions[0]
    for i in range(len(positions)):
        if ms[i] <= ms[0] * tolerance:
            best = positions[i]
    return best


def knee_scan(positions, ms, tolerance=1.25):
    """Wrong: gives up at the first pass over the limit."""
    best = positions[0]
    for T, cost in zip(positions, ms):
        if cost > ms[0] * tolerance:
            break
        best = T
    return best


def shifted_scores(logits, draft):
    best = logits.argmax(dim=-1)
    start = logits.shape[0] - draft.shape[0]
    return torch.stack([best[start + j - 1] for j in range(draft.shape[0])])


def accepted_prefix(draft, target):
    n = 0
    while n < len(draft) and draft[n] == target[n]:
        n += 1
    return n


def commit_round(draft, target):
    out = []
    for guess, truth in zip(draft, target):
        out.append(truth)
        if guess != truth:
            return out
    return [*out, target[-1]]


def fixed_k_accounting(rounds, k):
    emitted = wasted = 0
    for accepted in rounds:
        emitted += accepted + 1
        wasted += k - accepted
    return emitted, len(rounds) * k, wasted


def ragged_write(buffer, lengths, new):
    for b in range(buffer.shape[0]):
        start = int(lengths[b])
        buffer[b, start : start + new.shape[1]] = new[b]
    return buffer


def ragged_mask(lengths, T, capacity):
    mask = torch.zeros(len(lengths), T, capacity, dtype=torch.bool)
    for b, held in enumerate(lengths.tolist()):
        for t in range(T):
            mask[b, t, : held + t + 1] = True
    return mask


def acceptance_probability(p, q):
    return torch.tensor([0.0 if a == 0 else min(1.0, a / b) for a, b in zip(p.tolist(), q.tolist())])


def residual(p, q):
    left = [max(0.0, a - b) for a, b in zip(p.tolist(), q.tolist())]
    return torch.tensor([x / sum(left) for x in left]) if sum(left) else p


def chi_square_statistic(counts, probs):
    n = sum(counts.tolist())
    return sum((o - n * p) ** 2 / (n * p) for o, p in zip(counts.tolist(), probs.tolist()))


def written(p, q, token, r, u):
    if r < p[token] / q[token]:
        return token
    total = 0.0
    for x, weight in enumerate(residual(p, q).tolist()):
        total += weight
        if total > u:
            return x
    return len(p) - 1


RIGHT = {
    "tokens_per_pass": lambda emitted, passes: emitted / passes,
    "count_passes": count_passes,
    "weight_bytes": lambda num_params, bits: num_params * bits // 8,
    "predicted_ms": lambda weight_bytes, bandwidth_gb_s: 1e3 * (weight_bytes / 1e9) / bandwidth_gb_s,
    "arithmetic_intensity": lambda n, b, t: (2 * n * t) / (n * b),
    "greedy_step": lambda logits: torch.tensor([int(row[-1].argmax()) for row in logits]),
    "causal_mask": causal_mask,
    "knee": knee,
    "shifted_scores": shifted_scores,
    "accepted_prefix": accepted_prefix,
    "next_token": lambda draft, target: target[accepted_prefix(draft, target)],
    "round": commit_round,
    "fixed_k_accounting": fixed_k_accounting,
    "rollback_count": lambda k, num_accepted: (k + 1) - (num_accepted + 1),
    "ragged_write": ragged_write,
    "ragged_mask": ragged_mask,
    "draft_cache_rollback": lambda cache, text: cache - text + 1 if cache >= text else 0,
    "acceptance_probability": acceptance_probability,
    "residual": residual,
    "alpha": lambda p, q: float(1 - (p - q).abs().sum() / 2),
    "spin": lambda p, q, token, r: bool(r < p[token] / q[token]),
    "emitted_law": lambda p, q: torch.minimum(p, q) + torch.relu(p - q),
    "chi_square_statistic": chi_square_statistic,
    "find_the_bug": written,
}

# What the messages about common slips must mention, for answers written as a learner would.
WRONG = [
    ("accepted_prefix", lambda d, t: sum(a == b for a, b in zip(d, t)), "after a rejection"),
    ("accepted_prefix", lambda d, t: accepted_prefix(d, t) + 1, "one too many"),
    ("round", lambda d, t: d[: accepted_prefix(d, t)], "own token is missing"),
    ("round", lambda d, t: d if d == t[:-1] else commit_round(d, t), "bonus token is missing"),
    ("next_token", lambda d, t: t[-1], "last token"),
    ("rollback_count", lambda k, a: 0, "nothing is dropped"),
    ("rollback_count", lambda k, a: k + 1 - a, "one too many"),
    ("draft_cache_rollback", lambda cache, text: cache - text + 1, "must not be negative"),
    ("shifted_scores", lambda x, d: x[-len(d) :].argmax(-1), "shift is missing"),
    ("causal_mask", lambda T, past: torch.ones(T, past + T).tril().bool(), "past is not counted"),
    ("greedy_step", lambda x: x[:, -1].argmax(-1, keepdim=True), "[B, 1]"),
    ("weight_bytes", lambda n, bits: n * bits, "bits"),
    ("arithmetic_intensity", lambda n, b, t: 2 * n / (n * b), "read once"),
    ("ragged_mask", lambda n, T, C: ~ragged_mask(n, T, C), "inverted"),
    ("tokens_per_pass", lambda e, p: p / e, "upside down"),
    ("count_passes", lambda n, rounds: len(rounds), "stops once"),
    ("fixed_k_accounting", lambda r, k: (sum(r), k * len(r), k * len(r) - sum(r)), "own token"),
    ("ragged_write", lambda b, n, x: torch.cat([b, x], dim=1), "appended"),
    ("predicted_ms", lambda b, w: b / w / 1e9, "seconds"),
    ("knee", knee_scan, "noisy"),
    ("acceptance_probability", lambda p, q: (q / p).clamp(max=1), "p goes on top"),
    ("acceptance_probability", lambda p, q: p / q, "minimum with 1"),
    ("acceptance_probability", lambda p, q: torch.minimum(torch.ones(len(p)), p / q), "0/0 is NaN"),
    ("residual", lambda p, q: torch.relu(p - q), "not normalised"),
    ("residual", lambda p, q: torch.relu(p - q) / torch.relu(p - q).sum(), "0/0"),
    ("residual", lambda p, q: torch.relu(p - q) / (torch.relu(p - q).sum() + 1e-12), "all zeros"),
    ("residual", lambda p, q: (p - q).abs() / (p - q).abs().sum(), "no absolute value"),
    ("residual", lambda p, q: torch.relu(q - p) / torch.relu(q - p).sum(), "not q − p"),
    ("residual", lambda p, q: p, "second helping"),
    ("alpha", lambda p, q: (p @ q).item(), "two independent draws"),
    ("alpha", lambda p, q: 0.5 * (p - q).abs().sum().item(), "total variation"),
    ("alpha", lambda p, q: 1 - (p - q).abs().sum(), "½ is missing"),
    ("spin", lambda p, q, token, r: bool(r <= p[token] / q[token]), "exactly 0"),
    ("spin", lambda p, q, token, r: r <= min(1, p[token] / q[token]), "exactly 0"),
    ("emitted_law", torch.minimum, "accepted part alone"),
    ("emitted_law", lambda p, q: q * torch.clamp(p / q, max=1), "accepted part alone"),
    ("emitted_law", lambda p, q: torch.minimum(p, q) + torch.minimum(p, q).sum() * residual(p, q), "not α"),
    ("emitted_law", lambda p, q: torch.minimum(p, q) + (q - p).clamp(min=0).sum() * p, "paid twice"),
    ("chi_square_statistic", lambda o, p: ((o - len(o) * p) ** 2 / (len(o) * p)).sum(), "not right yet"),
    ("chi_square_statistic", lambda o, p: ((o - sum(o) * p) ** 2 / o).sum().item(), "not by the observed"),
    ("chi_square_statistic", lambda o, p: ((o / sum(o) - p) ** 2 / p).sum(), "shares"),
    ("chi_square_statistic", lambda o, p: ((o - sum(o) * p).abs() / (sum(o) * p)).sum(), "squared"),
    ("find_the_bug", lambda p, q, token, r, u: token, "not right yet"),
]


def test_every_exercise_has_a_check_and_an_answer_here():
    assert {e.name for e in EXERCISES} == set(RIGHT)
    assert all(callable(check_of(e)) and check_of(e).__doc__ for e in EXERCISES)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_right_answer_passes(exercise):
    result = check_of(exercise)(RIGHT[exercise.name])
    assert result, result
    assert result.status == "passed"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_stub_is_not_started_and_raises_nothing(exercise):
    def stub(*args):
        raise NotImplementedError("your turn")

    result = check_of(exercise)(stub)
    assert not result
    assert result.status == "not started"


@pytest.mark.parametrize(("exercise", "slip"), SLIPS, ids=lambda v: getattr(v, "name", None) or v.message[:40])
def test_each_slip_gets_its_own_message(exercise, slip):
    result = check_of(exercise)(slip.wrong)
    assert not result
    assert slip.message in result.message
    assert not any(other.message in result.message for other in exercise.slips if other is not slip)
    assert "Smallest failing case" in result.message


@pytest.mark.parametrize(("name", "answer", "said"), WRONG)
def test_learners_slip_is_recognised(name, answer, said):
    result = getattr(exercises, f"check_{name}")(answer)
    assert not result
    assert said in result.message


def test_unknown_mistake_shows_the_smallest_failing_case():
    result = exercises.check_accepted_prefix(lambda draft, target: 17)
    assert "not right yet" in result.message
    assert "accepted_prefix(draft=[7], target=[7, 8]): expected 1, got 17" in result.message


def test_exception_in_the_answer_is_told_with_its_input():
    result = exercises.check_next_token(lambda draft, target: target[len(draft) + 5])
    assert "IndexError: list index out of range" in result.message
    assert "draft=[7], target=[7, 8]" in result.message


def test_wrong_number_of_arguments_is_told():
    assert "positional argument" in exercises.check_weight_bytes(lambda params: params).message


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda logits: None, "`return` missing"),
        (lambda logits: [0], "a tensor was expected"),
        (lambda logits: logits[:, -1], "the shape is"),
        (lambda logits: logits[:, -1].argmax(-1).float(), "float values, expected integer"),
    ],
)
def test_kind_of_result_is_told(answer, said):
    assert said in exercises.check_greedy_step(answer).message


def test_called_function_instead_of_function():
    assert "without calling it" in exercises.check_knee(3).message


def test_answers_that_write_into_their_input_cannot_spoil_later_checks():
    def greedy(buffer, lengths, new):
        buffer.fill_(-1.0)
        return buffer

    assert not exercises.check_ragged_write(greedy)
    assert exercises.check_ragged_write(ragged_write)


def test_keyboard_interrupt_is_not_swallowed():
    def forever(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercises.check_round(forever)


def test_nan_is_wrong():
    assert not exercises.check_tokens_per_pass(lambda e, p: float("nan"))


def test_result_reads_as_text_and_as_html():
    result = CheckResult("knee", "failed", "`<=`, not `<`.\nSmallest failing case: …")
    assert repr(result) == "✗ knee: `<=`, not `<`.\nSmallest failing case: …"
    shown = result._repr_html_()
    assert "&lt;=" in shown and "<br>" in shown and "style" not in shown
    words = html.unescape(re.sub("<[^>]+>", " ", shown))
    assert "✗ knee: failed" in words and "Smallest failing case" in words


def test_results_are_the_same_every_time():
    wrong = [exercises.check_ragged_mask(lambda n, T, C: torch.zeros(len(n), T, C).bool()) for _ in range(2)]
    assert repr(wrong[0]) == repr(wrong[1])
    assert "0x" not in repr(wrong[0])


@pytest.fixture
def set_mode(monkeypatch):
    def to(value):
        monkeypatch.delenv("SPECNB_MODE", raising=False)
        if value is not None:
            monkeypatch.setenv("SPECNB_MODE", value)
        exercises.mode.cache_clear()

    yield to
    exercises.mode.cache_clear()


@pytest.mark.parametrize(("value", "size"), [(None, 64), ("full", 64), ("fast", 8)])
def test_budget_follows_the_mode(set_mode, value, size):
    set_mode(value)
    assert exercises.budget(full=64, fast=8) == size


def test_mode_is_read_once(set_mode, monkeypatch):
    set_mode("fast")
    assert exercises.mode() == "fast"
    monkeypatch.setenv("SPECNB_MODE", "full")
    assert exercises.mode() == "fast"


@pytest.mark.parametrize("value", ["quick", "", "FAST"])
def test_unknown_mode_is_refused(set_mode, value):
    set_mode(value)
    with pytest.raises(ValueError, match="SPECNB_MODE"):
        exercises.budget(full=64, fast=8)
