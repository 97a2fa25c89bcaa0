"""Schedules: drawn once, saved exactly, shared by arms."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.schedule import Schedule, draw, schedule_key
from harness.settings import LoadSettings, SettingsError

BASE = LoadSettings(
    arrival="poisson",
    qps=2.0,
    burstiness=1.0,
    concurrency=None,
    requests=40,
    warmup_requests=4,
    seed=0,
    request_timeout_s=120.0,
    caches="cold",
)


def load(**changes: Any) -> LoadSettings:
    return dataclasses.replace(BASE, **changes)


CLOSED = load(arrival="closed", qps=None, concurrency=4)


@given(
    st.sampled_from(["poisson", "gamma", "constant", "closed"]),
    st.floats(1e-3, 1e4),
    st.floats(1e-2, 1e2),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(0, 2**40),
)
def test_json_is_exactly_reversible(
    arrival: str, qps: float, burstiness: float, requests: int, samples: int, seed: int
) -> None:
    closed = arrival == "closed"
    schedule = draw(
        load(
            arrival=arrival,
            qps=None if closed else qps,
            concurrency=3 if closed else None,
            burstiness=burstiness,
            requests=requests,
            seed=seed,
        ),
        samples,
    )
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert len(schedule) == requests
    assert list(schedule.offsets_s) == sorted(schedule.offsets_s)
    assert set(schedule.order) <= set(range(samples))


def test_the_same_settings_draw_the_same_schedule() -> None:
    assert draw(BASE, 40) == draw(BASE, 40)
    assert draw(BASE, 40).offsets_s != draw(load(seed=1), 40).offsets_s
    assert draw(BASE, 40).order != draw(load(seed=1), 40).order


def test_the_order_is_a_permutation_and_does_not_depend_on_the_rate() -> None:
    schedule = draw(BASE, 40)
    assert sorted(schedule.order) == list(range(40))
    assert schedule.order != tuple(range(40))
    assert not schedule.repeats
    assert draw(load(qps=9.0), 40).order == schedule.order
    assert draw(CLOSED, 40).order == schedule.order


def test_more_requests_than_samples_cycle_and_say_so() -> None:
    schedule = draw(load(requests=25), 10)
    assert schedule.repeats
    assert sorted(schedule.order[:10]) == sorted(schedule.order[10:20]) == list(range(10))
    assert len(set(schedule.order[20:])) == 5
    assert schedule.order[:10] != schedule.order[10:20]


def test_a_closed_loop_has_no_instants() -> None:
    schedule = draw(CLOSED, 5)
    assert set(schedule.offsets_s) == {0.0}
    assert (schedule.qps, schedule.concurrency) == (None, 4)


def test_arms_share_a_key_and_other_loads_do_not() -> None:
    key = schedule_key(BASE, 40)
    assert key == schedule_key(load(request_timeout_s=1.0, caches="warm", warmup_requests=0), 40)
    assert key == schedule_key(load(burstiness=0.3), 40)  # only gamma arrivals have one
    others = {
        schedule_key(load(seed=1), 40),
        schedule_key(load(qps=3.0), 40),
        schedule_key(load(requests=41), 40),
        schedule_key(load(arrival="constant"), 40),
        schedule_key(load(arrival="gamma"), 40),
        schedule_key(load(arrival="gamma", burstiness=0.3), 40),
        schedule_key(CLOSED, 40),
        schedule_key(BASE, 41),
    }
    assert len(others | {key}) == 9


@pytest.mark.parametrize(
    ("changes", "samples", "key"),
    [
        ({"qps": None}, 5, "load.qps"),
        ({"qps": 0.0}, 5, "load.qps"),
        ({"qps": float("inf")}, 5, "load.qps"),
        ({"arrival": "gamma", "burstiness": 0.0}, 5, "load.burstiness"),
        ({"arrival": "closed", "qps": None}, 5, "load.concurrency"),
        ({"arrival": "often"}, 5, "load.arrival"),
        ({"requests": 0}, 5, "load.requests"),
        ({"seed": -1}, 5, "load.seed"),
        ({}, 0, "workload.samples"),
    ],
)
def test_errors_name_the_setting(changes: dict[str, Any], samples: int, key: str) -> None:
    with pytest.raises(SettingsError, match=key):
        draw(load(**changes), samples)


def test_what_is_no_schedule_is_refused() -> None:
    tree = json.loads(draw(BASE, 40).to_json())
    wrongs: list[Any] = [
        [],
        tree | {"format": 99},
        tree | {"more": 1},
        {k: v for k, v in tree.items() if k != "order"},
        tree | {"order": [1]},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="schedule"):
            Schedule.from_json(json.dumps(wrong))
