"""Whether the pocket world shows what it is there to show: goal, figure, yes or no."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.pocket.evaluation.arms import (
    CC,
    FULL,
    OCR_FINE,
    OCR_LARGE,
    RAG,
    RATIOS,
    RHOS,
    Task,
    sere_arm,
    topk_arm,
    vision_arm,
)
from harness.pocket.evaluation.measured import Measured, estimate
from harness.pocket.evaluation.table import Key
from metrics.intervals import Array, Estimate, mean, of_means

BASE_GOALS: tuple[tuple[Task, str, float], ...] = (
    (OCR_LARGE, "exact", 0.95),
    (OCR_FINE, "exact", 0.85),
    (CC, "ccbench", 0.95),
    (RAG, "image_edit", 0.90),
    (RAG, "rouge1", 0.90),
    (RAG, "citation_format", 0.99),
)
"""Task, metric, and the least value with everything kept and routing off."""

MUCH = 0.1
"""A loss of this much of the score counts as much."""
FEWER = 0.9
"""Experts read, over those that the router picked in the same steps, at which they count as fewer.
Not over those of the full arm: their number follows the batch, which timing makes."""
CHANCE: Mapping[str, float] = {OCR_LARGE.name: 0.0, OCR_FINE.name: 0.0, CC.name: 0.25}
"""What guessing scores."""

Found = Mapping[Key, Measured]


@dataclass(frozen=True)
class Verdict:
    """One goal.

    Attributes:
        goal: what is wanted.
        figure: what was found.
        met: whether it is so; `None` if that was not measured.
    """

    goal: str
    figure: str
    met: bool | None


def verdicts(found: Found) -> list[Verdict]:
    """All goals, in the order of the table. Pure: what was not measured is said to be so."""
    return [*_base(found), *_vision(found), *_routing(found)]


def text(given: Sequence[Verdict]) -> str:
    """A line for each."""
    words = {True: "yes", False: "NO", None: "not measured"}
    return "\n".join(f"- {v.goal}: {words[v.met]}{_tail(v)}" for v in given)


def _tail(verdict: Verdict) -> str:
    return f" – {verdict.figure}" if verdict.figure else ""


# -- everything kept, routing off -------------------------------------------------------------------


def _base(found: Found) -> Iterator[Verdict]:
    for task, metric, least in BASE_GOALS:
        goal = f"{task.name} {metric} >= {least:g}"
        here = found.get((FULL, task.name))
        if here is None:
            yield Verdict(goal, "", None)
        else:
            value = estimate(metric, here.scores[metric])
            yield Verdict(goal, _words(value), value.value >= least)


# -- vision -----------------------------------------------------------------------------------------


def _vision(found: Found) -> Iterator[Verdict]:
    curves = {t: _curve(found, t) for t in (OCR_LARGE, OCR_FINE, CC)}
    large, fine, cc = curves[OCR_LARGE], curves[OCR_FINE], curves[CC]
    yield _falls_first("fine print falls before large print", OCR_FINE, fine, OCR_LARGE, large)
    for task, curve in ((OCR_FINE, fine), (OCR_LARGE, large)):
        yield _falls_first(f"{task.name} falls before cc", task, curve, CC, cc)
    for task in (OCR_FINE, OCR_LARGE, CC):
        yield _beats_random(found, task)


def _curve(found: Found, task: Task) -> Array | None:
    """[questions, 2]: mean score over the pruned ratios by attention, and the score unpruned."""
    pruned = [m.main for r in RATIOS if (m := found.get((vision_arm("visionzip", r), task.name)))]
    base = found.get((FULL, task.name))
    if not pruned or base is None:
        return None
    return np.stack([np.mean(pruned, axis=0), base.main], axis=1)


def _share(task: Task, means: Array) -> Array:
    """Share of the unpruned score, above chance, that pruning leaves. means: [..., 2]."""
    chance = CHANCE[task.name]
    base = means[..., 1] - chance
    return np.where(base > 0, (means[..., 0] - chance) / np.where(base > 0, base, 1.0), np.nan)


def _falls_first(
    goal: str, first: Task, one: Array | None, second: Task, other: Array | None
) -> Verdict:
    if one is None or other is None:
        return Verdict(goal, "", None)
    left = float(_share(first, one.mean(axis=0))), float(_share(second, other.mean(axis=0)))
    if not np.isfinite(left).all():
        return Verdict(goal, "unpruned it scores no better than chance", False)
    gap = of_means(lambda a, b: np.nan_to_num(_share(second, b) - _share(first, a)), one, other)
    figure = (
        f"mean share of the score left over all ratios {left[0]:.2f} ({first.name}) against "
        f"{left[1]:.2f} ({second.name}), difference {_words(gap, signed=True)}"
    )
    return Verdict(goal, figure, gap.low > 0)


def _beats_random(found: Found, task: Task) -> Verdict:
    goal = f"{task.name}: attention beats random at the same count"
    gaps = {
        ratio: pair[0].main - pair[1].main
        for ratio in RATIOS
        if (pair := _both(found, task, *(vision_arm(p, ratio) for p in ("visionzip", "random"))))
    }
    if not gaps:
        return Verdict(goal, "", None)
    over_all = mean(np.mean(list(gaps.values()), axis=0))
    single = ", ".join(f"{r:g}: {g.mean():+.2f}" for r, g in gaps.items())
    figure = f"mean difference {_words(over_all, signed=True)}; by ratio {single}"
    return Verdict(goal, figure, over_all.low > 0)


# -- routing ----------------------------------------------------------------------------------------


def _routing(found: Found) -> Iterator[Verdict]:
    topk = topk_arm(2)
    for name, tasks in _GROUPS:
        goal = f"{name}: plain top-2 loses much (>= {MUCH:g})"
        loss = _difference(found, tasks, FULL, topk)
        met = None if loss is None else loss.value >= MUCH and loss.low > 0
        yield Verdict(goal, "" if loss is None else f"loses {_words(loss)}", met)
    for rho in RHOS:
        arm = sere_arm(2, rho)
        for name, tasks in _GROUPS:
            goal = f"{name}: {arm} loses clearly less than top-2, and reads fewer experts"
            gain, loss = _difference(found, tasks, arm, topk), _difference(found, tasks, FULL, arm)
            if gain is None or loss is None:
                yield Verdict(goal, "", None)
                continue
            before, after = (_experts(found, tasks, arm, when) for when in ("before", "after"))
            figure = (
                f"loses {_words(loss)}, {_words(gain, signed=True)} against top-2; "
                f"experts {before:.1f} → {after:.1f}"
            )
            yield Verdict(goal, figure, gain.low > 0 and after <= FEWER * before)
    plain, protected = sere_arm(2, 0.0), sere_arm(2, 0.0, protected=True)
    for name, tasks in _GROUPS:
        goal = f"{name}: protection wins part of it back"
        gain = _difference(found, tasks, protected, plain)
        figure = "" if gain is None else f"{_words(gain, signed=True)} against {plain}"
        yield Verdict(goal, figure, None if gain is None else gain.low > 0)


_GROUPS = (("ocr_fine", (OCR_FINE,)), ("rag", (RAG,)))


def _difference(found: Found, tasks: Sequence[Task], one: str, other: str) -> Estimate | None:
    """Mean score of arm `one` less that of `other`, question by question, over several tasks."""
    pairs = [_both(found, t, one, other) for t in tasks]
    if not all(pairs):
        return None
    return mean(np.concatenate([a.main - b.main for a, b in filter(None, pairs)]))


def _both(found: Found, task: Task, one: str, other: str) -> tuple[Measured, Measured] | None:
    a, b = found.get((one, task.name)), found.get((other, task.name))
    return None if a is None or b is None else (a, b)


def _experts(found: Found, tasks: Sequence[Task], arm: str, when: str) -> float:
    values = [found[arm, t.name].row[f"experts_{when}"] for t in tasks]
    return float(np.mean([np.nan if v is None else v for v in values]))


def _words(value: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{value.value:{sign}.3f} [{value.low:{sign}.2f}, {value.high:{sign}.2f}]"
