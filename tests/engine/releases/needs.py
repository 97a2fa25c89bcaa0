"""The table of what the plugin relies on in vLLM; read beside `harness/engine/plugin`.

A need states a fact about a release's sources and says what must be true of it. Facts are plain data, so
that those of a release can be kept without its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.engine.releases.sources import Sources, as_signature

Facts = dict[str, Any]
"""Question → answer, both as JSON has them."""


class Need(Protocol):
    """Something that must hold in a release."""

    def facts(self, vllm: Sources) -> Facts:
        """What the sources say about it."""

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        """What is wrong; empty if nothing is."""


@dataclass(frozen=True)
class Exists:
    """A name can be imported from a module."""

    name: str

    def facts(self, vllm: Sources) -> Facts:
        return {f"exists {self.name}": vllm.find(self.name) is not None}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        return [] if facts[f"exists {self.name}"] else [f"{self.name} is gone"]


@dataclass(frozen=True)
class Takes:
    """Something can be called with so many arguments by position and these by name."""

    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    method: bool = True

    def facts(self, vllm: Sources) -> Facts:
        return {f"signature {self.name}": vllm.signature(self.name)}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        parameters = facts[f"signature {self.name}"]
        if parameters is None:
            return [f"{self.name} is gone"]
        try:
            as_signature(parameters).bind(
                *[None] * (self.positional + self.method), **dict.fromkeys(self.keywords)
            )
        except TypeError as e:
            return [f"{self.name}{_shown(parameters)}: {e}"]
        return []


@dataclass(frozen=True)
class Replaces:
    """A method of ours takes whatever the stock one takes, and the stock one what ours hands on."""

    name: str
    ours: str
    hands_on: tuple[int, tuple[str, ...]] | None = None

    def facts(self, vllm: Sources) -> Facts:
        return {f"signature {self.name}": vllm.signature(self.name)}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        stock = facts[f"signature {self.name}"]
        if stock is None:
            return [f"{self.name} is gone"]
        own = ours.signature(self.ours)
        if own is None:
            return [f"{self.ours} is gone"]
        wrong = []
        for positional, keywords in _ways(stock):
            try:
                as_signature(own).bind(*[None] * positional, **dict.fromkeys(keywords))
            except TypeError as e:
                wrong.append(f"{self.ours} cannot stand for {self.name}{_shown(stock)}: {e}")
        if self.hands_on is not None:
            wrong += Takes(self.name, *self.hands_on).failures(facts, ours)
        return wrong


@dataclass(frozen=True)
class Has:
    """Instances of a class have these attributes, fields or methods."""

    name: str
    attributes: tuple[str, ...]

    def facts(self, vllm: Sources) -> Facts:
        present = vllm.attributes(self.name)
        return {f"attributes {self.name}": sorted(present & set(self.attributes))}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        missing = set(self.attributes) - set(facts[f"attributes {self.name}"])
        return [f"{self.name} has no {', '.join(sorted(missing))}"] if missing else []


@dataclass(frozen=True)
class IsCalled:
    """Somewhere in the stock sources, `callee` is called in a way that our hook takes.

    Attributes:
        name: function or class to look in, a module where it ends in ``:``.
        callee: as written there.
        positional: least number of arguments by position.
        keywords: arguments by name, at least.
    """

    name: str
    callee: str
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def facts(self, vllm: Sources) -> Facts:
        calls = [[c.positional, list(c.keywords)] for c in vllm.calls(self.name, self.callee)]
        return {f"calls {self.name} {self.callee}": calls}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        calls = facts[f"calls {self.name} {self.callee}"]
        fit = [n >= self.positional and {*self.keywords} <= {*names} for n, names in calls]
        if any(fit):
            return []
        return [
            f"{self.name} never calls {self.callee} with {self.positional} arguments and "
            f"{self.keywords}, but with {calls}"
        ]


@dataclass(frozen=True)
class Says:
    """Files hold these texts: names of settings, flags and models."""

    path: str
    texts: tuple[str, ...]

    def facts(self, vllm: Sources) -> Facts:
        found = vllm.texts(self.path)
        return {f"texts {self.path}": [t for t in self.texts if t in found]}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        missing = [t for t in self.texts if t not in facts[f"texts {self.path}"]]
        return [f"{self.path} nowhere says {', '.join(missing)}"] if missing else []


@dataclass(frozen=True)
class SameAnswer:
    """Two methods return the same type, so that one can stand for the other."""

    names: tuple[str, str]

    def facts(self, vllm: Sources) -> Facts:
        return {f"returns {name}": vllm.returns(name) for name in self.names}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        del ours
        one, other = (facts[f"returns {name}"] for name in self.names)
        return [] if one == other else [f"{self.names} return {one} and {other}"]


@dataclass(frozen=True)
class Either:
    """At least one of these holds: releases differ, and the plugin copes with each."""

    needs: tuple[Need, ...]

    def facts(self, vllm: Sources) -> Facts:
        return {k: v for need in self.needs for k, v in need.facts(vllm).items()}

    def failures(self, facts: Facts, ours: Sources) -> list[str]:
        wrong = [need.failures(facts, ours) for need in self.needs]
        return [] if not all(wrong) else [" / ".join(w[0] for w in wrong)]


def _shown(parameters: Sequence[Sequence[Any]]) -> str:
    return str(as_signature([tuple(p) for p in parameters])).replace("=None", "=…")


def _ways(stock: Sequence[Sequence[Any]]) -> list[tuple[int, list[str]]]:
    """The ways in which a method is called: as much by position as can be, and as much by name.

    `self` is by position both times.
    """
    by_place = [n for n, kind, _ in stock if kind in ("positional_only", "positional_or_keyword")]
    by_name = [n for n, kind, _ in stock if kind == "keyword_only"]
    any_name = ["another"] if any(kind == "var_keyword" for _, kind, _ in stock) else []
    return [
        (len(by_place), by_name + any_name),
        (1, by_place[1:] + by_name + any_name),
    ]


_MODELS = "vllm.model_executor.models"
_PLUGIN = "harness.engine.plugin"
_PROCESSING = "vllm.multimodal.processing"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_MOE = "vllm.model_executor.layers.fused_moe"

_CLASSES = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
}
_FUSED = f"{_PLUGIN}.model:FusedGroups"


def _model_needs(name: str) -> list[Need]:
    """What `FusedGroups` needs of a stock model class."""
    return [
        Replaces(f"{name}.__init__", f"{_FUSED}.__init__", (0, ("vllm_config", "prefix"))),
        Replaces(f"{name}.embed_multimodal", f"{_FUSED}.embed_multimodal", (0, ("pixel_values",))),
        Replaces(f"{name}.embed_input_ids", f"{_FUSED}.embed_input_ids", (2, ("is_multimodal",))),
        Replaces(f"{name}.forward", f"{_FUSED}.forward", (4, ("anything",))),
        Replaces(f"{name}.get_mrope_input_positions", f"{_FUSED}.get_mrope_input_positions"),
        Has(name, ("visual", "config", "language_model", "use_data_parallel")),
    ]


def _tower_needs(tower: str, attention: str) -> list[Need]:
    """What scoring needs of a vision encoder."""
    return [
        Takes(f"{tower}.forward", 1, ("grid_thw",)),
        Has(tower, ("blocks",)),
        # Query and key by name, after rotary embedding.
        IsCalled(f"{attention}.forward", "self.attn", 0, ("query", "key")),
    ]


def _processor_needs(info: str, processor: str, dummy: str) -> list[Need]:
    """What `GroupInfo`, `GroupProcessor` and `GroupDummyInputs` need of stock classes."""
    ours = f"{_PLUGIN}.processor"
    return [
        Exists(dummy),
        Replaces(
            f"{info}.get_mm_max_tokens_per_item",
            f"{ours}:GroupInfo.get_mm_max_tokens_per_item",
            (2, ()),
        ),
        Takes(f"{info}.get_max_image_tokens"),
        Takes(f"{info}.get_hf_config"),
        Takes(f"{info}.get_tokenizer"),
        Takes(f"{info}.get_image_processor", 0, ("size",)),
        Takes(
            f"{info}._get_vision_info",
            0,
            ("image_width", "image_height", "num_frames", "image_processor", "mm_kwargs"),
        ),
        Has(info, ("ctx", "allowed_mm_limits")),
        Replaces(f"{info}.get_hf_processor", f"{ours}:GroupInfo.get_hf_processor", (0, ())),
        # The stock processing has to come by the processor that leaves bytes as they are.
        IsCalled(f"{info}.get_image_processor", "self.get_hf_processor"),
        Replaces(f"{processor}.apply", f"{ours}:GroupProcessor.apply", (2, ())),
        Replaces(
            f"{processor}._cached_apply_hf_processor",
            f"{ours}:GroupProcessor._cached_apply_hf_processor",
        ),
        Takes(f"{processor}._apply_hf_processor", 2),
        SameAnswer((f"{processor}._cached_apply_hf_processor", f"{processor}._apply_hf_processor")),
        IsCalled(f"{processor}.apply", "self._cached_apply_hf_processor", 2),
        # Who makes the inputs that vLLM profiles.
        Either(
            (
                Replaces(
                    f"{processor}.get_dummy_inputs",
                    f"{ours}:GroupProcessor.get_dummy_inputs",
                    (3, ()),
                ),
                Replaces(
                    f"{dummy}.get_dummy_processor_inputs",
                    f"{ours}:GroupDummyInputs.get_dummy_processor_inputs",
                    (3, ()),
                ),
            )
        ),
        Either(
            (
                IsCalled(f"{processor}.get_dummy_mm_inputs", "self.get_dummy_inputs"),
                IsCalled(
                    "vllm.multimodal.registry:MultiModalRegistry.get_dummy_mm_inputs",
                    "processor.dummy_inputs.get_dummy_processor_inputs",
                ),
            )
        ),
    ]


NEEDS: tuple[Need, ...] = (
    # -- hooks.py
    Exists("vllm:ModelRegistry"),
    Takes("vllm.model_executor.models.registry:_ModelRegistry.get_supported_archs"),
    Takes("vllm.model_executor.models.registry:_ModelRegistry.register_model", 2),
    Says(
        "vllm/model_executor/models/registry.py",
        tuple(f'"{name}"' for names in _CLASSES.values() for name in names),
    ),
    # -- models/*.py and model.py
    *(
        need
        for module, names in _CLASSES.items()
        for name in names
        for need in _model_needs(f"{_MODELS}.{module}:{name}")
    ),
    *_tower_needs(
        f"{_MODELS}.qwen3_vl:Qwen3_VisionTransformer",
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionAttention",
    ),
    IsCalled(f"{_MODELS}.qwen3_vl:Qwen3_VisionBlock.__init__", "Qwen2_5_VisionAttention"),
    *_tower_needs(
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionTransformer",
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionAttention",
    ),
    Takes(f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionTransformer.get_window_index_thw", 3),
    IsCalled(f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionAttention.__init__", "MMEncoderAttention"),
    # -- scored.py
    Has(
        "vllm.model_executor.layers.attention.mm_encoder_attention:MMEncoderAttention",
        ("scale", "is_flash_attn_backend"),
    ),
    IsCalled(
        "vllm.v1.attention.ops.vit_attn_wrappers:flash_attn_maxseqlen_wrapper",
        "flash_attn_varlen_func",
        3,
        ("cu_seqlens_q", "max_seqlen_q"),
    ),
    Says(
        "vllm/v1/attention/ops/vit_attn_wrappers.py",
        ("from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func",),
    ),
    Says("vllm/v1/attention/backends/flash_attn.py", ("return_softmax_lse=True",)),
    Exists("vllm.distributed:tensor_model_parallel_all_gather"),
    Takes("vllm.distributed:get_tensor_model_parallel_world_size", method=False),
    Takes("vllm.distributed:tensor_model_parallel_all_reduce", 1, method=False),
    Exists("vllm.multimodal:MULTIMODAL_REGISTRY"),
    Takes(
        "vllm.multimodal.registry:MultiModalRegistry.register_processor",
        1,
        ("info", "dummy_inputs"),
    ),
    Takes("vllm.multimodal.registry:MultiModalRegistry.get_processing_info", 1),
    Has("vllm.config:ParallelConfig", ("pipeline_parallel_size", "worker_extension_cls")),
    Has("vllm.config:SchedulerConfig", ("max_num_batched_tokens",)),
    Has("vllm.config:VllmConfig", ("parallel_config", "scheduler_config", "model_config")),
    Has(
        "vllm.multimodal.inputs:MultiModalFeatureSpec",
        ("data", "modality", "identifier", "mm_position"),
    ),
    IsCalled(_RUNNER, "self.model.embed_input_ids", 1, ("multimodal_embeddings", "is_multimodal")),
    IsCalled(_RUNNER, "*.get_mrope_input_positions", 2),
    IsCalled(_RUNNER, "*.embed_multimodal"),
    # -- processor.py
    *_processor_needs(
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VLProcessingInfo",
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VLMultiModalProcessor",
        f"{_MODELS}.qwen2_5_vl:Qwen2_5_VLDummyInputsBuilder",
    ),
    *_processor_needs(
        f"{_MODELS}.qwen3_vl:Qwen3VLProcessingInfo",
        f"{_MODELS}.qwen3_vl:Qwen3VLMultiModalProcessor",
        f"{_MODELS}.qwen3_vl:Qwen3VLDummyInputsBuilder",
    ),
    Exists(f"{_MODELS}.qwen3_vl_moe:Qwen3VLMoeProcessingInfo"),
    Exists(f"{_MODELS}.qwen3_5:Qwen3_5ProcessingInfo"),
    Exists(f"{_MODELS}.qwen3_5:Qwen3_5MoeProcessingInfo"),
    Has(f"{_PROCESSING}.inputs:ProcessorInputs", ("hf_processor_mm_kwargs", "mm_data_items")),
    Has("vllm.multimodal.parse:MultiModalDataItems", ("get_all_counts",)),
    Takes("vllm.multimodal.parse:ImageProcessorItems", 1),
    Takes("vllm.multimodal.parse:ImageProcessorItems.get_all"),
    Takes("vllm.multimodal.inputs:MultiModalBatchedField", 0, ("keep_on_cpu",)),
    Takes("vllm.multimodal.inputs:MultiModalFlatField", 0, ("slices", "keep_on_cpu")),
    Takes("vllm.multimodal.inputs:MultiModalFieldElem", 0, ("data", "field")),
    Exists("vllm.multimodal.inputs:MultiModalKwargsItem"),
    Exists("vllm.multimodal.inputs:MultiModalKwargsItems"),
    Takes("vllm.multimodal.inputs:PlaceholderRange", 0, ("offset", "length")),
    Has(
        "vllm.inputs.engine:MultiModalInput",
        ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders"),
    ),
    # -- worker.py
    Takes(f"{_RUNNER}.get_model"),
    # -- routing.py
    Takes("vllm.config:get_current_vllm_config", method=False),
    Has(
        f"{_MOE}.runner.moe_runner:MoERunner",
        ("layer_name", "moe_config", "router", "is_monolithic"),
    ),
    Has(
        f"{_MOE}.config:FusedMoEConfig", ("num_experts", "num_logical_experts", "experts_per_token")
    ),
    IsCalled(f"{_MOE}.router.base_router:BaseRouter._select_experts", "self._compute_routing", 1),
    # -- steps.py
    Takes(f"{_RUNNER}._prepare_inputs", 2),
    IsCalled(_RUNNER, "self._prepare_inputs", 2),
    Has(_RUNNER, ("device", "input_batch", "num_spec_tokens")),
    Exists(f"{_RUNNER_V2}.prepare_inputs"),
    Exists(f"{_RUNNER}._dummy_run"),
    Exists(f"{_RUNNER_V2}._dummy_run"),
    Exists("vllm.triton_utils:HAS_TRITON"),
    IsCalled(_RUNNER_V2, "self.prepare_inputs", 1),
    Has(_RUNNER_V2, ("device",)),
    Has(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        ("req_ids", "num_scheduled_tokens", "is_prefilling_np", "num_tokens"),
    ),
    Has(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        ("num_reqs", "req_ids", "num_computed_tokens_cpu", "num_prompt_tokens"),
    ),
    Has(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("scheduled_new_reqs", "num_scheduled_tokens"),
    ),
    Has("vllm.v1.core.sched.output:NewRequestData", ("req_id", "mm_features")),
    Exists("vllm.v1.worker.cpu_model_runner:CPUModelRunner"),
    # -- harness/engine/command.py
    Says(
        "vllm/envs.py",
        (
            "VLLM_USE_V2_MODEL_RUNNER",
            "VLLM_PLUGINS",
            "VLLM_SERVER_DEV_MODE",
            "VLLM_CPU_KVCACHE_SPACE",
        ),
    ),
    Says(
        "vllm/engine/arg_utils.py",
        (
            '"--limit-mm-per-prompt"',
            '"--mm-processor-cache-gb"',
            '"--worker-extension-cls"',
            '"--enable-prefix-caching"',
            '"--max-num-batched-tokens"',
        ),
    ),
    Says("vllm/entrypoints/**/*.py", ('"/collective_rpc"', '"/reset_prefix_cache"')),
)


def facts_of(vllm: Sources) -> Facts:
    """All facts that the table asks for."""
    return {k: v for need in NEEDS for k, v in sorted(need.facts(vllm).items())}


def failures(facts: Facts, ours: Sources) -> list[str]:
    """What the plugin would miss in a release with these facts."""
    return list(dict.fromkeys(f for need in NEEDS for f in need.failures(facts, ours)))
