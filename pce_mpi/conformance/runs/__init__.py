"""Runs: each case is called on all ranks, in jobs that may hang or crash."""
