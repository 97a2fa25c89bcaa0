"""The pocket world: seeded batches of pictures, questions and answers, as tensors.

Training draws them by the hundred on a GPU; `harness.pocket.generate` draws the same ones on a CPU and
writes them as published data sets.
"""
