"""Optimizers, and the synchronization of Partial gradients before their steps."""
