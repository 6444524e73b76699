"""A trainer and a scorer on other numbers of ranks see equal log-probabilities, and so a PPO ratio of exactly 1.

    mpiexec -n 5 python -m mpi4py examples/policy_gradient.py

prints

    ranks of trainer and scorer        2, 3
    log-probabilities have equal bits  True
    ratio of new to old policy         1.0 for all 96 tokens
    clipped tokens, second step        48
    entropy                            4.1379, then 4.1383
    steps agree with one process       True

The scorer computed the log-probabilities of the tokens that it drew. From logits of equal bits, those of the trainer
have equal bits on any number of ranks. So whatever differs from 1 later has been learned: in two steps of PPO with an
entropy bonus, from -mean(min(ratio A, clip(ratio) A)) - bonus mean(entropy).
"""

from mpi4py import MPI
import numpy as np

import pce_mpi
from pce_mpi import dense

comm = MPI.COMM_WORLD
TOKENS, WIDTH, VOCABULARY = 96, 16, 101
CLIP, BONUS, RATE = 0.02, 0.05, 0.2

# The first ranks train and the others score; one rank alone does both.
trainers = max(1, comm.size * 2 // 5)
group = MPI.Intracomm(comm.Split(int(comm.rank < trainers)))
mine = slice(*pce_mpi.shard_range(VOCABULARY, group.size, group.rank))

rng = np.random.default_rng(0)
hidden = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
weights = (rng.standard_normal((WIDTH, VOCABULARY)) / 4).astype(np.float32)
tokens, advantage = rng.integers(VOCABULARY, size=TOKENS), rng.standard_normal(TOKENS)
# A BLAS gives shards of other shapes other last bits; a sum for each column does not.
logits = np.stack([(hidden * column).sum(axis=1, dtype=np.float32) for column in weights.T], axis=1)
old = np.asarray(pce_mpi.class_statistics(logits[:, mine], tokens, comm=group, num_classes=VOCABULARY).log_prob)
everyones = comm.allgather(old)


def upstream(log_prob):
    """The gradients of the loss by the log-probabilities and entropies, and how many tokens are clipped."""
    ratio = np.exp(log_prob - old)
    clipped = np.where(advantage > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    return {"log_prob": np.where(clipped, 0.0, -ratio * advantage / TOKENS), "entropy": -BONUS / TOKENS}, clipped.sum()


agree, seen = True, []
w, expected = weights[:, mine], weights.astype(np.float64)
for _ in range(2 if comm.rank < trainers else 0):
    found, residuals = pce_mpi.class_statistics_forward(hidden @ w, tokens, comm=group, num_classes=VOCABULARY)
    gradients, clipped = upstream(found.log_prob)
    w = w - np.float32(RATE) * (hidden.T @ pce_mpi.class_statistics_backward(residuals, **gradients))
    gradients, _ = upstream(dense.class_statistics(hidden @ expected, tokens).log_prob)
    expected -= RATE * (hidden.T @ dense.class_statistics_backward(hidden @ expected, tokens, **gradients))
    agree &= bool(np.allclose(w, expected[:, mine], atol=2e-6))
    seen.append((clipped, found.entropy.mean()))

all_agree = comm.allreduce(agree, MPI.LAND)
equal = len({log_prob.tobytes() for log_prob in everyones}) == 1
if comm.rank == 0:
    ratio = np.exp(old - everyones[-1])
    print(f"{'ranks of trainer and scorer':<35}{trainers}, {comm.size - trainers}")
    print(f"{'log-probabilities have equal bits':<35}{equal}")
    print(f"{'ratio of new to old policy':<35}{ratio.max():.1f} for all {(ratio == 1.0).sum()} tokens")
    print(f"{'clipped tokens, second step':<35}{seen[1][0]}")
    print(f"{'entropy':<35}{seen[0][1]:.4f}, then {seen[1][1]:.4f}")
    print(f"{'steps agree with one process':<35}{all_agree}")
if not (all_agree and equal):
    raise SystemExit(1)
