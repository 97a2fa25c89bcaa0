"""The three similarities, against their definitions written out over all tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.calibration import MEASURES, SIMILARITY_FILE, measures, similarity_file
from harness.calibration.measures import (
    ACCUMULATORS,
    CkaAccumulator,
    FrobeniusAccumulator,
    frobenius_similarity,
)
from harness.calibration.similarity import CalibrationError


def outputs(experts: int = 6, tokens: int = 50, hidden: int = 9, seed: int = 0) -> Tensor:
    """Experts that share a part, unequally, so that their similarities differ."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(experts, tokens, hidden, generator=generator)
    shared = torch.randn(tokens, hidden, generator=generator)
    return own + torch.linspace(0, 2, experts)[:, None, None] * shared


def measured(measure: str, a: Tensor, sizes: list[int] | None = None) -> Tensor:
    gram = ACCUMULATORS[measure](len(a))
    for chunk in a.split(sizes or [a.shape[1]], dim=1):
        gram.add(chunk)
    assert gram.tokens == a.shape[1]
    return gram.similarity()


def distances(a: Tensor) -> Tensor:
    flat = a.double().flatten(1)
    return (flat[:, None] - flat[None, :]).norm(dim=-1)


def dense_frobenius(a: Tensor) -> Tensor:
    d = distances(a)
    return 1 - d / d.max()


def dense_cosine(a: Tensor) -> Tensor:
    b = a.double()
    return (torch.cosine_similarity(b[:, None], b[None], dim=-1).mean(-1) + 1) / 2


def dense_hsic(x: Tensor, y: Tensor) -> Tensor:
    """The unbiased estimate, term by term."""
    n = len(x)
    k, m = ((z @ z.T).fill_diagonal_(0) for z in (x, y))
    one = torch.ones(n, dtype=x.dtype)
    trace = (k @ m).trace()
    sums = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    cross = 2 * (one @ k @ m @ one) / (n - 2)
    return (trace + sums - cross) / (n * (n - 3))


def dense_cka(a: Tensor, rows: int) -> Tensor:
    parts = [p for p in a.double().split(rows, dim=1) if p.shape[1] >= 4]
    total = torch.zeros(len(a), len(a), dtype=torch.float64)
    for part in parts:
        total += part.shape[1] * torch.stack(
            [torch.stack([dense_hsic(x, y) for y in part]) for x in part]
        )
    size = total.diagonal().sqrt()
    return (total / size / size[:, None]).clamp(0, 1)


def plain_cka(a: Tensor) -> Tensor:
    """The definition with its bias, from centred columns."""
    b = a.double() - a.double().mean(1, keepdim=True)
    cross = (b[:, None].mT @ b[None]).square().sum((-1, -2))
    size = cross.diagonal().sqrt()
    return cross / size / size[:, None]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("sizes", [[50], [1] * 50, [7, 20, 23]])
def test_chunks_give_what_the_definition_gives_at_once(
    measure: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "CKA_ROWS", 16)
    a = outputs()
    dense = {
        "frobenius": dense_frobenius(a),
        "cosine": dense_cosine(a),
        "cka": dense_cka(a, 16),  # minibatches of 16, 16, 16, and two tokens that do not count
    }[measure]
    got = measured(measure, a, sizes)
    torch.testing.assert_close(got, dense.fill_diagonal_(1).float(), rtol=1e-5, atol=1e-6)
    assert got[~torch.eye(6, dtype=torch.bool)].std() > 0.03


@pytest.mark.parametrize("measure", MEASURES)
def test_range_symmetry_and_diagonal(measure: str) -> None:
    for seed, scale in ((1, 1.0), (2, 1e-4), (3, 1e4)):
        sim = measured(measure, scale * outputs(seed=seed))
        assert sim.dtype == torch.float32
        assert torch.equal(sim, sim.T)
        assert torch.equal(sim.diagonal(), torch.ones(6))
        assert sim.min() >= 0 and sim.max() <= 1


@pytest.mark.parametrize("measure", MEASURES)
def test_one_scale_for_all_and_a_turn_for_all_change_nothing(measure: str) -> None:
    a = outputs()
    turn = torch.linalg.qr(torch.randn(9, 9, generator=torch.Generator().manual_seed(5)))[0]
    torch.testing.assert_close(measured(measure, 37 * a), measured(measure, a))
    torch.testing.assert_close(measured(measure, a @ turn), measured(measure, a))


def test_what_each_measure_does_not_see() -> None:
    a = outputs()
    generator = torch.Generator().manual_seed(6)
    turned = a.clone()
    turned[1] = a[1] @ torch.linalg.qr(torch.randn(9, 9, generator=generator))[0]
    scaled = a * torch.tensor([1, 2, 3, 4, 5, 6.0])[:, None, None]
    moved = a + torch.randn(6, 1, 9, generator=generator)
    for changed, blind in ((turned, {"cka"}), (scaled, {"cosine", "cka"}), (moved, {"cka"})):
        for measure in MEASURES:
            same = torch.allclose(measured(measure, changed), measured(measure, a), atol=1e-5)
            assert same == (measure in blind)


def test_with_many_tokens_cka_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CKA_ROWS", 256)
    many = outputs(tokens=4096)
    torch.testing.assert_close(measured("cka", many), plain_cka(many).float(), rtol=0, atol=0.02)
    # With few the plain one calls alike what has nothing in common.
    few = torch.randn(6, 20, 40, generator=torch.Generator().manual_seed(7))
    off = ~torch.eye(6, dtype=torch.bool)
    assert plain_cka(few)[off].min() > 0.5
    assert measured("cka", few)[off].max() < 0.3


def test_near_twins_keep_their_distance() -> None:
    a = outputs() + 1000  # a large part that all experts share
    a[1] = a[0] + 1e-3 * outputs(seed=9)[0]
    gram = FrobeniusAccumulator(6)
    gram.add(a)
    torch.testing.assert_close(gram.distances(), distances(a), rtol=1e-6, atol=0)


@pytest.mark.parametrize("measure", MEASURES)
def test_identical_experts_are_alike(measure: str) -> None:
    a = outputs()
    a[4] = a[2]
    assert measured(measure, a)[2, 4] > 0.999_99


def test_frobenius_of_equal_experts_and_of_the_farthest_pair() -> None:
    assert torch.equal(frobenius_similarity(torch.zeros(3, 3)), torch.ones(3, 3))
    assert measured("frobenius", outputs()).min() == 0


def test_experts_that_say_nothing() -> None:
    a = outputs()
    a[3] = 0
    assert torch.equal(measured("cosine", a)[3, :3], torch.full((3,), 0.5))
    a[3] = 5.0  # the same of every token
    assert torch.equal(measured("cka", a)[3, :3], torch.zeros(3))


@pytest.mark.parametrize("measure", MEASURES)
def test_too_little_is_refused(measure: str) -> None:
    gram = ACCUMULATORS[measure](6)
    with pytest.raises(CalibrationError, match="0 tokens for calibration"):
        gram.similarity()
    with pytest.raises(ValueError, match=r"expected \[6, tokens, hidden\], got \[5, 50, 9\]"):
        gram.add(outputs(experts=5))
    cka = CkaAccumulator(6)
    cka.add(outputs(tokens=3))
    with pytest.raises(CalibrationError, match="at least 4"):
        cka.similarity()


def test_asking_twice_and_going_on() -> None:
    a = outputs()
    gram = CkaAccumulator(6)
    gram.add(a[:, :30])
    assert torch.equal(gram.similarity(), gram.similarity())
    gram.add(a[:, 30:])
    torch.testing.assert_close(gram.similarity(), measured("cka", a))


def test_names_and_files() -> None:
    assert tuple(ACCUMULATORS) == MEASURES
    assert similarity_file("frobenius") == SIMILARITY_FILE
    assert similarity_file("cka") == "pruneroute/sere_similarity_cka.safetensors"
    with pytest.raises(ValueError, match="takes one of frobenius, cosine, cka"):
        similarity_file("cos")
