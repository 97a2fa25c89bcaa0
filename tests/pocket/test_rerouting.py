"""The re-routing study: all steps at once as the reference does one, and what it counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.pocket.answers import Moments, reroute
from harness.pocket.evaluation.rerouting import Result, Setting, primaries, row
from kernels.sere import reference
from kernels.sere.reference import DECODE

EXPERTS, SLOTS = 12, 4


def routes(rows: int, seed: int) -> Tensor:
    """[rows, E], SLOTS of them not zero."""
    g = torch.Generator().manual_seed(seed)
    shares = torch.rand(rows, EXPERTS, generator=g)
    keep = torch.rand(rows, EXPERTS, generator=g).topk(SLOTS, dim=1).indices
    kept = torch.zeros_like(shares).scatter(1, keep, shares.gather(1, keep))
    return kept / kept.sum(1, keepdim=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [1, 2, SLOTS])
def test_every_step_is_what_the_reference_makes_of_it(seed: int, k: int) -> None:
    g = torch.Generator().manual_seed(100 + seed)
    rows, steps = 40, 7
    weights = routes(rows, seed)
    of = torch.randint(-1, steps, (rows,), generator=g)
    similarity = torch.rand(EXPERTS, EXPERTS, generator=g)
    protected = torch.rand(EXPERTS, generator=g) < 0.2
    when = Moments(of, torch.zeros_like(of), steps)
    got, before, after = reroute(
        weights, when, torch.full((rows,), k), similarity, 0.5, protected, SLOTS
    )
    assert torch.equal(got[of < 0], weights[of < 0])
    for step in range(steps):
        own = weights[of == step]
        shares, ids = own.topk(SLOTS, dim=1)
        kinds = torch.full((len(own),), DECODE)
        moved = reference.sere(ids, shares, kinds, similarity, protected, k, 0.5)
        torch.testing.assert_close(
            got[of == step], torch.zeros_like(own).scatter_add(1, moved, shares)
        )
        assert int(before[step]) == len(ids.unique())
        assert int(after[step]) == len(moved.unique())


def test_rows_have_the_primaries_of_their_step_and_age() -> None:
    when = Moments(torch.tensor([0, 0, 1, -1]), torch.tensor([1, 5, 2, 0]), 2)
    rows = torch.tensor([2, 1])
    none = torch.zeros(1, EXPERTS, dtype=torch.bool)
    by_batch = Setting((0, 4, 3), torch.zeros(1), none)
    assert primaries(by_batch, when, rows).tolist() == [3, 3, 4, 3]
    young = Setting(1, torch.zeros(1), none, first_tokens=2, young_experts=4)
    assert primaries(young, when, rows).tolist() == [4, 1, 4, 4]


def test_a_line_has_the_mean_increase_of_a_token_and_its_interval() -> None:
    tokens, right = torch.tensor([10.0, 10.0, 20.0]), torch.tensor([True, True, False])
    plain = Result(torch.tensor([1.0, 2.0, 3.0]), tokens, right, 4.0, 9.0, 9.0)
    moved = Result(torch.tensor([2.0, 3.0, 5.0]), tokens, right, 4.0, 9.0, 5.0)
    line = row("study", "name", moved, plain)
    assert line["loss_increase"] == 0.1
    assert line["plus_minus"] == pytest.approx(1.96 * 3**-0.5 * 3**0.5 / 40, abs=1e-5)
    assert (line["experts_before"], line["experts_after"]) == (9.0, 5.0)
    assert line["right"] == 0.6667
