"""Similarity and protection matrices, from samples to a small file."""

SIMILARITY_FILE = "pruneroute/sere_similarity.safetensors"
"""Where a checkpoint's similarity matrices lie, from its folder. Not beside the weights: where there is
no index, vLLM takes every safetensors file there for weights."""
