"""A small GPT: one forward pass for every mesh with the dims `data`, `context` and `model`.

The placements of the parameters (PLAN), of the batch (`loss`) and of the calls of `redistribute` determine what is
sent. `data` ranks share the batch. `context` ranks share each sequence; all of them need all keys and values. `model`
ranks share heads, hidden units and vocabulary; between two blocks they share the sequence (sequence parallelism), or
all of them compute the same.
"""

import numpy as np

import pce_mpi as pce
from pce_mpi import Colwise, Replicate, Replicated, Rowwise, SequenceParallel, Shard, VocabParallel

PLAN = {
    "tokens": VocabParallel(),
    "unigram": VocabParallel(),
    "positions": Replicated(),
    "*norm": SequenceParallel(),
    "*.qkv": Colwise(),
    "*.out": Rowwise(),
    "*.up": Colwise(),
    "*.down": Rowwise(),
}


class GPT:
    def __init__(self, mesh, unigram, args):
        """Start with logits close to `unigram`, the log-probability of each token without any context."""
        self.mesh, self.args = mesh, args
        self.between_blocks = Shard(1) if args.sequence_parallel else Replicate()
        rng, width, ones = np.random.default_rng(args.seed), args.width, np.ones(args.width, np.float32)

        def matrix(rows, columns, scale=None):
            return rng.standard_normal((rows, columns), np.float32) * (scale or rows**-0.5)

        arrays = {"unigram": unigram.astype(np.float32), "norm": ones}
        arrays |= {"tokens": matrix(len(unigram), width, 0.02), "positions": matrix(args.length, width, 0.02)}
        for layer in range(args.layers):
            arrays |= {f"{layer}.qkv": matrix(width, 3 * width), f"{layer}.out": matrix(width, width)}
            arrays |= {f"{layer}.up": matrix(width, 4 * width), f"{layer}.down": matrix(4 * width, width)}
            arrays |= {f"{layer}.attention_norm": ones, f"{layer}.hidden_norm": ones}
        self.parameters = pce.shard_parameters(arrays, mesh, PLAN, dim="model")
        self.optimizers = [(args.rate, pce.SGD(self.parameters.values(), lr=args.rate))]

    def logits(self, ids):
        p = self.parameters
        x = (pce.embedding(ids, p["tokens"]) + p["positions"][: ids.shape[1]]).redistribute(model=self.between_blocks)
        for layer in range(self.args.layers):
            for block in (self.attention, self.hidden):
                y = pce.layer_norm(x, p[f"{layer}.{block.__name__}_norm"]).redistribute(model=Replicate())
                x = x + block(y, layer).redistribute(model=self.between_blocks)
        return pce.layer_norm(x, p["norm"]).redistribute(model=Replicate()) @ p["tokens"].T + p["unigram"]

    def attention(self, x, layer):
        batch, length, width = x.shape
        # The columns of qkv are grouped by head, so that a shard has whole heads with their queries, keys and values.
        heads = (x @ self.parameters[f"{layer}.qkv"]).reshape(batch, length, self.args.heads, -1).swapaxes(1, 2)
        q, k, v = pce.split(heads, 3, axis=-1)
        k, v = (each.redistribute(context=Replicate()) for each in (k, v))
        attended = pce.scaled_dot_product_attention(q, k, v, causal=True)
        return attended.swapaxes(1, 2).reshape(batch, length, width) @ self.parameters[f"{layer}.out"]

    def hidden(self, x, layer):
        return pce.gelu(x @ self.parameters[f"{layer}.up"]) @ self.parameters[f"{layer}.down"]

    def loss(self, rows):
        shards = {"data": Shard(0), "context": Shard(1)}
        ids, targets = (pce.distribute(part, self.mesh, **shards) for part in (rows[:, :-1], rows[:, 1:]))
        return pce.cross_entropy(self.logits(ids), targets)

    def next_logits(self, tokens):
        ids = pce.distribute(np.array([tokens[-self.args.length :]]), self.mesh)
        return self.logits(ids)[0, -1]
