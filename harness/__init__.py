"""PruneRoute: how far vision tokens can be pruned and experts re-routed before answers suffer.

Kept empty on purpose: engine processes import this package while PyTorch itself is starting.
"""
