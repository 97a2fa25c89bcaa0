"""What the levers count, and what becomes of it when nobody looks for a long time."""

from __future__ import annotations

import base64
import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.engine.plugin import steps as steps_of
from harness.engine.plugin import telemetry
from harness.engine.plugin.routing import LEVER, RoutedLayer
from harness.engine.plugin.steps import decoding, note_prepared, row_kinds
from harness.engine.plugin.telemetry import (
    COUNTERS,
    Step,
    StepLog,
    VisionLog,
    pack_steps,
    per_request,
)
from kernels.sere.reference import DECODE, PREFILL

LAYERS = 2
CPU = torch.device("cpu")


def rows_of(decode: int, prefill: int) -> np.ndarray:
    return np.array([DECODE] * decode + [PREFILL] * prefill, dtype=np.uint8)


def run_step(
    log: StepLog, value: int, requests: tuple[str, ...] = ("r",), prefill: int = 0
) -> None:
    """One engine step in which layer l counts value, value + 10 l, value + 20 l."""
    log.begin(requests, rows_of(len(requests), prefill), (0,) * 5)
    for layer in range(LAYERS):
        counted = torch.tensor([value, value + 10 * layer, value + 20 * layer], dtype=torch.int32)
        log.counters[log.slot, layer] = counted


def want(value: int) -> list[list[int]]:
    return [[value, value + 10 * layer, value + 20 * layer] for layer in range(LAYERS)]


def test_counters_come_back_in_order_and_only_once() -> None:
    log = StepLog(LAYERS, CPU, 32)
    for value in range(5):
        run_step(log, value, prefill=value)
    steps, counts, lost = log.drain()
    assert [s.number for s in steps] == list(range(5))
    assert [s.prefill_rows for s in steps] == list(range(5))
    assert [s.decode_rows for s in steps] == [1] * 5
    assert [s.at_s for s in steps] == sorted(s.at_s for s in steps)
    assert counts.tolist() == [want(v) for v in range(5)]
    assert lost == 0
    run_step(log, 9)
    steps, counts, lost = log.drain()
    assert (counts.tolist(), lost) == ([want(9)], 0)
    assert log.drain()[0] == []


def test_steps_without_decode_rows_are_not_listed() -> None:
    log = StepLog(LAYERS, CPU, 32)
    run_step(log, 1)
    run_step(log, 2, requests=(), prefill=30)
    run_step(log, 3)
    steps, counts, _ = log.drain()
    assert [s.number for s in steps] == [0, 2]
    assert counts.tolist() == [want(1), want(3)]


@pytest.mark.parametrize("steps", [8, 9, 15, 16, 17, 43])
def test_what_was_overwritten_is_counted_as_lost(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_STEPS", 8)
    log = StepLog(LAYERS, CPU, 32)
    for round_ in range(2):  # the ring goes on where it stood
        for value in range(steps):
            run_step(log, 100 * round_ + value)
        kept, counts, lost = log.drain()
        assert lost == steps - 8
        assert len(kept) == 8
        assert counts.tolist() == [want(100 * round_ + v) for v in range(steps - 8, steps)]


def test_prefill_steps_overwrite_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_STEPS", 8)
    log = StepLog(LAYERS, CPU, 32)
    for value in range(3):
        run_step(log, value)
    for _ in range(6):
        run_step(log, -1, requests=(), prefill=5)
    run_step(log, 7)
    steps, counts, lost = log.drain()
    # Ten steps in a ring of eight: steps 0 and 1 are gone.
    assert [s.number for s in steps] == [2, 9]
    assert counts.tolist() == [want(2), want(7)]
    assert lost == 2


def test_a_write_touches_its_own_step_and_layer_alone() -> None:
    log = StepLog(LAYERS, CPU, 32)
    run_step(log, 5)
    before = log.counters.clone()
    log.begin(("r",), rows_of(1, 0), (0,) * 5)
    log.counters[log.slot, 1] = torch.tensor([7, 8, 9], dtype=torch.int32)
    assert log.counters[1, 1].tolist() == [7, 8, 9]
    log.counters[1, 1] = 0
    assert torch.equal(log.counters, before)


def test_means_are_over_a_requests_own_steps_and_all_layers() -> None:
    steps = [
        Step(0, 0.0, ("a",), 1, 0),
        Step(1, 0.1, ("a", "b"), 2, 9),
        Step(2, 0.2, ("b", "c", "d"), 3, 0),
    ]
    counts = np.array([[[8, 4, 1], [6, 2, 3]], [[16, 8, 4], [12, 6, 2]], [[20, 9, 0], [10, 7, 6]]])
    got = per_request(steps, counts)
    assert got == {
        "a": _means(2, 1.5, (7 + 14) / 2, (3 + 7) / 2, (2 + 3) / 2),
        "b": _means(2, 2.5, (14 + 15) / 2, (7 + 8) / 2, (3 + 3) / 2),
        "c": _means(1, 3.0, 15, 8, 3),
        "d": _means(1, 3.0, 15, 8, 3),
    }
    assert per_request([], np.zeros((0, LAYERS, len(COUNTERS)))) == {}


def _means(steps: int, batch: float, before: float, after: float, moved: float) -> dict[str, float]:
    return {
        "steps": steps,
        "batch_size": batch,
        "experts_before": before,
        "experts_after": after,
        "slots_moved": moved,
    }


@pytest.mark.parametrize("count", [0, 1, 4])
def test_packed_steps_unpack_to_themselves(count: int) -> None:
    log = StepLog(LAYERS, CPU, 32)
    for value in range(count):
        run_step(log, value, requests=("a", "b"), prefill=value)
    steps, counts, _ = log.drain()
    packed = np.load(io.BytesIO(base64.b64decode(pack_steps(steps, counts), validate=True)))
    assert set(packed) == {"at_s", "decode_rows", "prefill_rows", *COUNTERS}
    assert packed["at_s"].tolist() == [s.at_s for s in steps]
    assert packed["decode_rows"].tolist() == [2] * count
    assert packed["prefill_rows"].tolist() == list(range(count))
    for column, name in enumerate(COUNTERS):
        assert packed[name].shape == (count, LAYERS)
        assert packed[name].tolist() == [[row[column] for row in want(v)] for v in range(count)]


def test_the_least_recently_used_groups_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "MAX_GROUPS", 3)
    log = VisionLog()
    for key in (1, 2, 3):
        log.record(key, [(10 * key, key)])
    assert log.find(1) == [(10, 1)]
    log.record(4, [(40, 4)])
    assert [log.find(k) for k in (1, 2, 3, 4)] == [[(10, 1)], None, [(30, 3)], [(40, 4)]]
    log.record(1, [(10, 2)])  # encoded anew
    assert log.find(1) == [(10, 2)]
    assert log.groups_encoded == 5


# -- row kinds -------------------------------------------------------------------------------------


def kinds(*requests: tuple[int, int, int], width: int = 1) -> list[int]:
    """Row kinds of requests given as (scheduled, computed, prompt)."""
    scheduled, computed, prompt = (np.array(column) for column in zip(*requests, strict=True))
    got = row_kinds(scheduled, decoding(scheduled, computed, prompt, width))
    assert got.dtype == np.uint8
    return got.tolist()


def test_a_request_decodes_once_its_prompt_is_computed() -> None:
    assert kinds((1, 10, 10)) == [DECODE]
    assert kinds((1, 25, 10)) == [DECODE]
    assert kinds((4, 0, 10)) == [PREFILL] * 4
    assert kinds((6, 4, 10)) == [PREFILL] * 6
    assert kinds((1, 9, 10)) == [PREFILL]  # the prompt's last token, all others cached
    assert kinds((1, 0, 1)) == [PREFILL]


def test_tokens_computed_anew_after_preemption_are_prefill() -> None:
    assert kinds((25, 0, 10)) == [PREFILL] * 25
    assert kinds((9, 16, 10)) == [PREFILL] * 9


def test_mixed_batches_keep_their_order_and_speculation_its_width() -> None:
    assert kinds((1, 10, 10), (3, 0, 8), (1, 12, 4)) == [DECODE, *[PREFILL] * 3, DECODE]
    assert kinds((4, 10, 10), (5, 10, 10), width=4) == [DECODE] * 4 + [PREFILL] * 5


def test_a_step_without_requests_has_no_rows() -> None:
    empty = np.array([], dtype=np.int64)
    assert row_kinds(empty, decoding(empty, empty, empty, 1)).tolist() == []


@dataclass
class Prepared:
    """What notes of V2's `InputBatch` are taken from."""

    req_ids: list[str]
    num_scheduled_tokens: np.ndarray
    is_prefilling_np: np.ndarray
    num_tokens: int


@pytest.fixture
def lever(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The routing lever with two layers, and nothing of it left behind."""
    made = {i: RoutedLayer(i, 8, 2) for i in range(LAYERS)}
    monkeypatch.setattr(LEVER, "layers", made)
    monkeypatch.setattr(LEVER, "log", StepLog(LAYERS, CPU, 16))
    monkeypatch.setattr(LEVER, "refusal", None)
    monkeypatch.setattr(LEVER, "prepare", lambda device: None)
    monkeypatch.setattr(steps_of, "REQUEST_GROUPS", OrderedDict())
    yield


def test_a_step_of_the_second_runner_is_noted(lever: None) -> None:
    runner, output = SimpleNamespace(device=CPU), SimpleNamespace(scheduled_new_reqs=[])
    assert LEVER.log is not None
    LEVER.log.begin((), rows_of(0, 12), (0,) * 5)  # of which nothing is left after the next
    prefilling = np.array([False, True, False])
    batch = Prepared(["a", "b", "c"], np.array([1, 4, 1]), prefilling, 6)
    note_prepared(runner, output, batch)
    assert LEVER.log.row_kind.tolist() == [DECODE, *[PREFILL] * 4, DECODE] + [0] * 10
    step = LEVER.log.drain()[0][0]
    assert (step.decode_requests, step.decode_rows, step.prefill_rows) == (("a", "c"), 2, 4)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("adaptive_verification", object(), "adaptive verification"),
        ("parallel_config", SimpleNamespace(use_ubatching=True), "enable_dbo"),
    ],
)
def test_rows_that_nobody_can_tell_apart_are_refused(
    lever: None, attribute: str, value: object, reason: str
) -> None:
    runner = SimpleNamespace(device=CPU, **{attribute: value})
    output = SimpleNamespace(scheduled_new_reqs=[])
    batch = Prepared(["a", "b"], np.array([4, 4]), np.array([False, False]), 6)
    note_prepared(runner, output, batch)
    assert LEVER.refusal is not None
    assert reason in LEVER.refusal
    assert LEVER.log is not None
    assert LEVER.log.row_kind.tolist() == [0] * 16
    with pytest.raises(RuntimeError, match="a step of 17 rows; 16 were planned for"):
        LEVER.log.begin((), rows_of(8, 9), (0,) * 5)
