"""The settings of one cell: frozen, typed, and checked before any work starts.

`conf/` holds the values and says what each is for; the dataclasses here hold types and ranges.
`Settings.from_tree` turns a composed configuration into them, or raises one `SettingsError` that
names every wrong key together with what it takes.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

_HUGE = 2.0**63
"""No setting is this large; NaN is not less than it either."""


class SettingsError(ValueError):
    """One or more settings are wrong; the message has a line for each."""


@dataclass(frozen=True)
class _Check:
    """A range: `test` of the value, and `takes`, the words that say what it accepts."""

    test: Callable[[Any], bool]
    takes: str


def _one_of(*names: str) -> _Check:
    return _Check(lambda v: v in names, "one of " + ", ".join(names))


def _number(takes: str, test: Callable[[Any], bool]) -> _Check:
    return _Check(lambda v: abs(v) < _HUGE and test(v), takes)


def _at_least(low: float) -> _Check:
    return _number(f"a number >= {low:g}", lambda v: v >= low)


def _whole_or(word: str, low: int) -> _Check:
    return _Check(
        lambda v: v == word if isinstance(v, str) else low <= v < _HUGE,
        f"a whole number >= {low}, or {word}",
    )


def _positive() -> _Check:
    return _number("a number > 0", lambda v: v > 0)


@dataclass(frozen=True)
class EngineSettings:
    """How the one vLLM server of a sweep is started, or where it is."""

    kind: Annotated[str, _one_of("cpu", "gpu", "remote")]
    plugin: bool
    dtype: Annotated[str, _one_of("bfloat16", "float16", "float32")]
    max_model_len: Annotated[int, _at_least(16)]
    max_num_seqs: Annotated[int, _at_least(1)]
    max_num_batched_tokens: Annotated[int, _at_least(16)]
    images_per_request: Annotated[int, _at_least(0)]
    prefix_caching: bool
    block_size: Annotated[int | None, _at_least(1)]
    enforce_eager: bool
    tensor_parallel_size: Annotated[int, _at_least(1)]
    memory_fraction: Annotated[
        float | None, _number("a number in (0, 1], or null", lambda v: 0 < v <= 1)
    ]
    kv_cache_gib: Annotated[int | None, _at_least(1)]
    seed: Annotated[int, _at_least(0)]
    url: str | None
    api_key_env: str | None
    start_timeout_s: Annotated[float, _positive()]
    stop_timeout_s: Annotated[float, _positive()]
    extra_args: tuple[str, ...]


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoint is served."""

    name: str
    path: str | None


@dataclass(frozen=True)
class WorkloadSettings:
    """What is asked."""

    name: str
    format: Annotated[str, _one_of("ocrbench", "ccbench", "rag_igbench")]
    path: str | None
    samples: Annotated[int, _at_least(1)]
    images_per_request: Annotated[int, _at_least(1)]
    mix_format: Annotated[str | None, _one_of("ocrbench", "ccbench", "rag_igbench")]
    mix_path: str | None
    mix_images: Annotated[int, _at_least(0)]
    seed: Annotated[int, _at_least(0)]
    max_tokens: Annotated[int, _at_least(1)]
    ignore_eos: bool
    temperature: Annotated[float, _at_least(0)]


@dataclass(frozen=True)
class LoadSettings:
    """When it is asked."""

    arrival: Annotated[str, _one_of("poisson", "gamma", "constant", "closed")]
    qps: Annotated[float | None, _positive()]
    burstiness: Annotated[float, _positive()]
    concurrency: Annotated[int | None, _at_least(1)]
    requests: Annotated[int, _at_least(1)]
    warmup_requests: Annotated[int, _at_least(0)]
    seed: Annotated[int, _at_least(0)]
    request_timeout_s: Annotated[float, _positive()]
    caches: Annotated[str, _one_of("cold", "warm")]


@dataclass(frozen=True)
class VisionSettings:
    """The prefill lever."""

    policy: Annotated[str, _one_of("none", "visionzip", "random", "grid", "downscale")]
    retain_ratio: Annotated[float, _number("a number in (0, 1]", lambda v: 0 < v <= 1)]
    min_tokens_per_image: Annotated[int, _at_least(0)]
    layer: int
    budget: Annotated[
        str, _one_of("raw", "sink_clipped", "rank", "per_image", "excess", "log_excess")
    ]
    merge: Annotated[str, _one_of("none", "contextual")]
    contextual_share: Annotated[float, _number("a number in [0, 1)", lambda v: 0 <= v < 1)]

    @property
    def prunes(self) -> bool:
        """Whether any token may go."""
        return self.policy != "none" and self.retain_ratio < 1


@dataclass(frozen=True)
class RoutingSettings:
    """The decode lever."""

    policy: Annotated[str, _one_of("off", "topk", "sere", "random_remap", "oea", "xshare", "lynx")]
    primary_experts: Annotated[int | str | None, _whole_or("auto", 1)]
    similarity_threshold: Annotated[float, _number("a number in [0, 1]", lambda v: 0 <= v <= 1)]
    similarity_quantile: Annotated[
        float | None, _number("a number in [0, 1]", lambda v: 0 <= v <= 1)
    ]
    renormalize: bool
    budget: Annotated[int | None, _at_least(1)]
    seed: Annotated[int, _number("a number in [0, 2^31)", lambda v: 0 <= v < 2**31)]
    floor_batch: Annotated[int, _at_least(0)]
    auto_experts: Annotated[float, _at_least(1)]
    similarity_path: str | None
    protection_path: str | None


def shown_k(routing: RoutingSettings) -> int | str | None:
    """K as tables show it: "auto 5" where it follows the batch."""
    k = routing.primary_experts
    return f"{k} {routing.auto_experts:g}" if k == "auto" else k


@dataclass(frozen=True)
class ReportSettings:
    """Where results go and how they are shown."""

    title: str
    name: str
    folder: str
    resume: str | None


@dataclass(frozen=True)
class Settings:
    """All settings of one cell, one attribute for each group of `conf/`."""

    engine: EngineSettings
    model: ModelSettings
    workload: WorkloadSettings
    load: LoadSettings
    vision: VisionSettings
    routing: RoutingSettings
    report: ReportSettings

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Settings:
        """Build from nested plain mappings, as `OmegaConf.to_container` gives them.

        Raises:
            SettingsError: a key is unknown or missing, a type is wrong, a value is out of range, or
                settings contradict each other. All findings are listed, each with its key.
        """
        findings: list[str] = []
        groups: dict[str, Any] = {}
        types_ = typing.get_type_hints(cls)
        _report_strangers("", tree, list(types_), findings)
        for name, group_type in types_.items():
            if isinstance(tree.get(name), Mapping):
                groups[name] = _build(name, group_type, tree[name], findings)
            else:
                findings.append(f"{name}: missing; expected a group of settings")
        if findings:
            raise SettingsError("\n".join(findings))
        settings = cls(**groups)
        findings = list(_contradictions(settings))
        if findings:
            raise SettingsError("\n".join(findings))
        return settings

    def to_tree(self) -> dict[str, Any]:
        """The same as nested plain dictionaries and lists, ready for JSON."""
        return dataclasses.asdict(self)


def _build(prefix: str, cls: type, tree: Mapping[str, Any], findings: list[str]) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    _report_strangers(prefix + ".", tree, list(hints), findings)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        key = f"{prefix}.{f.name}"
        kinds, optional, check = _unwrap(hints[f.name])
        if f.name not in tree:
            findings.append(f"{key}: missing")
            continue
        value = tree[f.name]
        words = check.takes if check else _KIND_WORDS[kinds[0]]
        if kinds == (int,):
            words = words.replace("a number", "a whole number")
        if optional and "null" not in words:
            words += ", or null"
        if value is None and optional:
            values[f.name] = None
            continue
        converted = next((c for k in kinds if (c := _convert(k, value)) is not None), None)
        if converted is None or (check and not check.test(converted)):
            findings.append(f"{key}={value!r}: takes {words}")
        else:
            values[f.name] = converted
    return cls(**values) if len(values) == len(hints) else None


_KIND_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
}


def _unwrap(hint: Any) -> tuple[tuple[type, ...], bool, _Check | None]:
    """`Annotated[int | None, c]` → ((int,), True, c), `tuple[str, ...]` → ((tuple,), False, None)."""
    check = None
    if typing.get_origin(hint) is Annotated:
        hint, check = typing.get_args(hint)
    hints = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(h) or h for h in hints if h is not type(None))
    return kinds, type(None) in hints, check


def _convert(kind: type, value: Any) -> Any:
    """The value as `kind`, or `None` if it is not one. No silent narrowing: 2.5 is not an int."""
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            return float(value) if is_number else None
        except OverflowError:  # a whole number of hundreds of digits
            return None
    if kind is str:
        # YAML reads a bare `off` as false; where text is expected the word was meant.
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, int | float):
            return str(value)
        return value if isinstance(value, str) and value else None
    if kind is tuple:
        is_list = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        return tuple(value) if is_list else None
    raise TypeError(f"no conversion to {kind}")


def _report_strangers(
    prefix: str, tree: Mapping[str, Any], known: list[str], findings: list[str]
) -> None:
    for name in tree:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else "known: " + ", ".join(known)
            findings.append(f"{prefix}{name}: no such setting; {hint}")


def _contradictions(s: Settings) -> typing.Iterator[str]:
    """Settings that are each valid, but not together."""
    if s.load.arrival == "closed":
        if s.load.concurrency is None:
            yield "load.concurrency=None: load.arrival=closed takes a whole number >= 1"
        if s.load.qps is not None:
            yield f"load.qps={s.load.qps!r}: load.arrival=closed has no rate; takes null"
    else:
        if s.load.qps is None:
            yield f"load.qps=None: load.arrival={s.load.arrival} takes a number > 0"
        if s.load.concurrency is not None:
            yield (
                f"load.concurrency={s.load.concurrency!r}: only load.arrival=closed limits it; "
                "takes null"
            )
    r = s.routing
    if r.policy in ("xshare", "lynx") and r.primary_experts is not None and r.budget is None:
        yield f"routing.budget=None: routing.policy={r.policy} takes a whole number >= 1"
    e = s.engine
    if e.kind == "remote":
        if not (e.url or "").startswith(("http://", "https://")):
            yield f"engine.url={e.url!r}: engine=remote takes a base URL, http://… or https://…"
    elif e.url is not None:
        yield f"engine.url={e.url!r}: only engine=remote has one; takes null"
    if e.kind != "gpu" and e.memory_fraction is not None:
        yield f"engine.memory_fraction={e.memory_fraction!r}: only engine=gpu has one; takes null"
    if e.kind == "gpu" and e.memory_fraction is None:
        yield "engine.memory_fraction=None: engine=gpu takes a number in (0, 1]"
    if e.kind != "cpu" and e.kv_cache_gib is not None:
        yield f"engine.kv_cache_gib={e.kv_cache_gib!r}: only engine=cpu has one; takes null"
    if e.kind == "cpu" and e.kv_cache_gib is None:
        yield "engine.kv_cache_gib=None: engine=cpu takes a whole number >= 1"
    if e.kind == "cpu" and e.block_size is not None and e.block_size % 32:
        yield f"engine.block_size={e.block_size!r}: engine=cpu takes a multiple of 32, or null"
    if e.max_num_batched_tokens < e.max_num_seqs:
        yield (
            f"engine.max_num_batched_tokens={e.max_num_batched_tokens}: takes a whole number >= "
            f"engine.max_num_seqs ({e.max_num_seqs})"
        )
    if s.workload.max_tokens >= e.max_model_len:
        yield (
            f"workload.max_tokens={s.workload.max_tokens}: takes a whole number < "
            f"engine.max_model_len ({e.max_model_len})"
        )
    w = s.workload
    if w.path is None and w.format != "ocrbench" and w.images_per_request != 1:
        yield (
            f"workload.images_per_request={w.images_per_request}: only drawn items of "
            "workload.format=ocrbench have a choice; takes 1"
        )
    if w.path is None and w.images_per_request > e.images_per_request:
        yield (
            f"workload.images_per_request={w.images_per_request}: takes a whole number <= "
            f"engine.images_per_request ({e.images_per_request})"
        )
    if (w.mix_format is None) != (w.mix_images == 0):
        yield (
            f"workload.mix_images={w.mix_images}: takes 0 with workload.mix_format=null, and a whole "
            "number >= 1 with another"
        )
    if w.mix_format is None and w.mix_path is not None:
        yield f"workload.mix_path={w.mix_path!r}: takes null with workload.mix_format=null"
    if not e.plugin:
        if s.vision.prunes:
            yield (
                f"vision.retain_ratio={s.vision.retain_ratio}: needs the plugin inside the engine; "
                "set engine.plugin=true, or take 1.0"
            )
        if s.routing.policy != "off" and s.routing.primary_experts is not None:
            yield (
                f"routing.primary_experts={s.routing.primary_experts}: needs the plugin inside the "
                "engine; set engine.plugin=true, or take null"
            )
