"""Lets torchvision import beside a PyTorch that lacks its C++ operators.

The torchvision wheel of the package index is built for CUDA; beside a CPU PyTorch its operators do
not load, and `import torchvision` fails while registering shapes for them. vLLM's Qwen-VL models need
only torchvision's pure-Python transforms, for which declared schemas are enough. PyTorch calls this
through its ``torch.backends`` entry points at the end of ``import torch``, in every process.
"""

from __future__ import annotations

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library = None


def declare() -> None:
    """Declare torchvision's operators where PyTorch has no CUDA and nobody declared them. Idempotent."""
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _library = library
