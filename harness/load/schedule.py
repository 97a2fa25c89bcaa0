"""`Schedule`: when each request is to be sent, and which sample it asks.

Drawn once from a named seed, saved as JSON, and replayed for every arm, so that arms differ by
their levers and by nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.load import arrivals
from harness.load.seeds import derive
from harness.settings import LoadSettings, SettingsError

FORMAT = 1


@dataclass(frozen=True)
class Schedule:
    """The plan of one measured load.

    Attributes:
        arrival: ``poisson``, ``gamma``, ``constant`` or ``closed``.
        seed: `load.seed`, from which arrivals and order were drawn, each from a stream of its own.
        qps: offered rate [requests/s]; `None` for a closed loop.
        burstiness: gamma shape; `None` unless `arrival` is ``gamma``.
        concurrency: requests kept in flight by a closed loop; `None` for an open one.
        offsets_s: per request, the instant to send it [s from the origin], not decreasing; all 0
            for a closed loop, which sends when a slot frees.
        order: per request, the index of its sample in the workload.
        format: version of this layout.
    """

    arrival: str
    seed: int
    qps: float | None
    burstiness: float | None
    concurrency: int | None
    offsets_s: tuple[float, ...]
    order: tuple[int, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if len(self.offsets_s) != len(self.order):
            raise ValueError(
                f"schedule: {len(self.offsets_s)} offsets for {len(self.order)} requests"
            )

    def __len__(self) -> int:
        return len(self.order)

    @property
    def repeats(self) -> bool:
        """Whether a sample is asked more than once, so that caches may answer for the model."""
        return len(set(self.order)) < len(self.order)

    def to_json(self) -> str:
        """The schedule as one JSON object; `from_json` gives back an equal one, bit for bit."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is no JSON object, has another format version, or lacks a field.
        """
        tree: Any = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("schedule: expected a JSON object")
        if tree.get("format") != FORMAT:
            raise ValueError(
                f"schedule: format {tree.get('format')!r}; this version reads {FORMAT}"
            )
        names = {f.name for f in dataclasses.fields(cls)}
        missing, unknown = sorted(names - set(tree)), sorted(set(tree) - names)
        if missing or unknown:
            raise ValueError(f"schedule: missing {missing}, unknown {unknown}")
        tree["offsets_s"] = tuple(float(x) for x in tree["offsets_s"])
        tree["order"] = tuple(int(i) for i in tree["order"])
        return cls(**tree)


def draw(load: LoadSettings, n_samples: int) -> Schedule:
    """Draw the schedule of `load.requests` requests over `n_samples` samples.

    The order is a random permutation of the samples; when there are more requests than samples,
    further permutations follow, and `Schedule.repeats` says so.

    Raises:
        SettingsError: a setting that the arrival process needs is missing or out of range.
    """
    _check(load, n_samples)
    rng = derive(load.seed, "load.arrivals")
    n = load.requests
    qps = load.qps if load.qps is not None else float("nan")  # `_check` has seen to it
    if load.arrival == "poisson":
        offsets = arrivals.poisson(n, qps, rng)
    elif load.arrival == "gamma":
        offsets = arrivals.gamma(n, qps, load.burstiness, rng)
    elif load.arrival == "constant":
        offsets = arrivals.constant(n, qps)
    else:
        offsets = np.zeros(n)
    return Schedule(
        arrival=load.arrival,
        seed=load.seed,
        qps=load.qps,
        burstiness=load.burstiness if load.arrival == "gamma" else None,
        concurrency=load.concurrency,
        offsets_s=tuple(offsets.tolist()),
        order=_order(n, n_samples, derive(load.seed, "load.order")),
    )


def schedule_key(load: LoadSettings, n_samples: int) -> str:
    """A name for what `draw` would return: equal keys, equal schedules.

    Settings that do not shape the schedule (time-outs, warm-up, caches) are not in it.
    """
    shape = (
        FORMAT,
        load.arrival,
        load.seed,
        load.qps,
        load.burstiness if load.arrival == "gamma" else None,
        load.concurrency,
        load.requests,
        n_samples,
    )
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]


def _order(n: int, n_samples: int, rng: np.random.Generator) -> tuple[int, ...]:
    rounds = -(-n // n_samples)
    order = np.concatenate([rng.permutation(n_samples) for _ in range(rounds)])[:n]
    return tuple(order.tolist())


def _check(load: LoadSettings, n_samples: int) -> None:
    """What `Settings.from_tree` checks, for settings that were built in another way."""
    findings: list[str] = []
    if load.arrival not in ("poisson", "gamma", "constant", "closed"):
        findings.append(f"load.arrival={load.arrival!r}: takes poisson, gamma, constant or closed")
    elif load.arrival == "closed":
        if load.concurrency is None or load.concurrency < 1:
            findings.append(
                f"load.concurrency={load.concurrency!r}: load.arrival=closed takes a whole "
                "number >= 1"
            )
    elif load.qps is None or not 0 < load.qps < float("inf"):
        findings.append(f"load.qps={load.qps!r}: load.arrival={load.arrival} takes a number > 0")
    if load.arrival == "gamma" and not 0 < load.burstiness < float("inf"):
        findings.append(f"load.burstiness={load.burstiness!r}: takes a number > 0")
    if load.requests < 1:
        findings.append(f"load.requests={load.requests!r}: takes a whole number >= 1")
    if load.seed < 0:
        findings.append(f"load.seed={load.seed!r}: takes a whole number >= 0")
    if n_samples < 1:
        findings.append(f"workload.samples={n_samples!r}: takes a whole number >= 1")
    if findings:
        raise SettingsError("\n".join(findings))
