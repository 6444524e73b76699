"""A small neural language model of Python's standard library, with the vocabulary sharded over MPI ranks.

    mpiexec -n 2 python -m mpi4py examples/language_model.py

The model (Bengio et al., A Neural Probabilistic Language Model, 2003) predicts a token from the few before it:

    x = the embeddings of those tokens, concatenated    (rows, context * embed)
    h = tanh(x @ w + b)                                 (rows, hidden)
    logits = h @ u + c                                  (rows, vocabulary)

With tens of thousands of different tokens nearly all parameters and nearly all work belong to one token each. So each
rank holds the embeddings, u, c and the logits of its shard of the vocabulary, and no rank ever holds all. PLAN says so;
what is sent, forward and backward, follows from it. The same seed gives the same losses on any number of ranks.
"""

from mpi4py import MPI
import numpy as np

from command_line import parse_arguments
from corpus import FILE_START, contexts, read_corpus
from evaluation import evaluate
import pce_mpi as pce
from training_options import training_parser
from transformer import train

NUMBERS = (
    ("context", 1, 4, "tokens that a prediction is made from"),
    ("embed", 1, 128, "length of the vector that stands for a token of the context"),
    ("hidden", 1, 128, "width of the hidden layer"),
    ("embedding-rate", 0, 1.0, "learning rate of the embeddings"),
)
PLAN = {"embedding": pce.VocabParallel(), "[wb]": pce.Replicated(), "[uc]": pce.Colwise()}


class Model:
    def __init__(self, mesh, unigram, args):
        self.mesh, self.args = mesh, args
        rng, tokens, inputs = np.random.default_rng(args.seed), len(unigram), args.context * args.embed
        arrays = {
            "embedding": 0.1 * rng.standard_normal((tokens, args.embed), np.float32),
            "w": rng.standard_normal((inputs, args.hidden), np.float32) / np.float32(inputs**0.5),
            "b": np.zeros(args.hidden, np.float32),
            "u": np.zeros((args.hidden, tokens), np.float32),  # while u is 0 this is the unigram model
            "c": unigram.astype(np.float32),
        }
        self.parameters = pce.shard_parameters(arrays, mesh, PLAN, dim="classes")
        embedding, *others = self.parameters.values()
        # A token is rare in the batch that the loss averages over, so embeddings need a larger rate than the others.
        groups = [{"params": [embedding], "lr": args.embedding_rate * args.batch}, {"params": others}]
        self.optimizer = pce.SGD(groups, lr=args.rate)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def logits(self, contexts):
        embedding, w, b, u, c = self.parameters.values()
        x = pce.embedding(contexts, embedding).reshape(len(contexts), -1)
        return pce.tanh(x @ w + b) @ u + c

    def loss(self, rows):
        return pce.cross_entropy(self.logits(rows[:, :-1]), rows[:, -1])

    def next_logits(self, tokens):
        tokens = [FILE_START] * self.args.context + tokens
        return self.logits(np.array([tokens[-self.args.context :]]))[0]


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm, training_parser(__doc__, NUMBERS, steps=800, batch=256, rate=3.0))
    corpus = read_corpus(comm, args)
    mesh = pce.Mesh(comm, classes=comm.size)
    training, held_out = contexts(corpus.training, args.context), contexts(corpus.held_out, args.context)
    model = train(lambda mesh: Model(mesh, corpus.unigram(), args), mesh, training, corpus, args)
    evaluate(model, corpus, held_out, slice(-1, None), args)
