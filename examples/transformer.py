"""Train a small GPT on Python's standard library, with the batch, the sequences and the layers sharded as you choose.

    mpiexec -n 4 python -m mpi4py examples/transformer.py --data 2 --model 2 --sequence-parallel

One forward pass serves every mesh with the dims `data`, `context` and `model`. The placements of the parameters (PLAN),
of the batch (`loss`) and of the calls of `redistribute` determine what is sent. `data` ranks share the batch. `context`
ranks share each sequence; all of them need all keys and values. `model` ranks share heads, hidden units and vocabulary;
between two blocks they share the sequence (sequence parallelism), or all of them compute the same.

On any mesh and any number of ranks the losses are those of one process, up to rounding, and a mesh can go on with the
parameters and the moments of AdamW that another mesh saved:

    mpiexec -n 2 python -m mpi4py examples/transformer.py --model 2 --stop 500 --save half.safetensors
    mpiexec -n 3 python -m mpi4py examples/transformer.py --context 3 --resume half.safetensors
"""

import contextlib
import json
import time

from mpi4py import MPI
import numpy as np

from command_line import parse_arguments
from comparison import compare_steps, stop
from corpus import passages, read_corpus
from evaluation import evaluate
from loss_curve import plot
import pce_mpi as pce
from pce_mpi import Colwise, Replicate, Replicated, Rowwise, SequenceParallel, Shard, VocabParallel
from pce_mpi.cli.progress import Bar
from pce_mpi.conformance.reports.files import write
from training_options import training_parser

NUMBERS = (
    ("layers", 1, 2, "layers, each of attention and hidden units"),
    ("heads", 1, 12, "attention heads in a layer"),
    ("width", 1, 96, "length of the vector that stands for a token, a multiple of the heads"),
    ("length", 1, 32, "tokens of a sequence"),
    ("decay", 0, 0.1, "weight decay of matrices"),
    ("data", 0, 0, "ranks that share the batch; 0: as many as the others leave"),
    ("context", 1, 1, "ranks that share each sequence"),
    ("model", 1, 1, "ranks that share heads, hidden units and vocabulary"),
)
# EPS is well above the rounding of a gradient of norm 1. Otherwise an element that is nothing but rounding would take a
# step of the whole learning rate, and on another mesh perhaps the opposite one.
BETAS, EPS = (0.9, 0.95), 1e-6
SHARDS = {"data": Shard(0), "context": Shard(1)}  # of a batch
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
            if mesh.is_hollow:  # in a rehearsal no number is drawn
                return np.broadcast_to(np.float32(0), (rows, columns))
            return rng.standard_normal((rows, columns), np.float32) * (scale or rows**-0.5)

        arrays = {"unigram": unigram.astype(np.float32), "norm": ones}
        arrays |= {"tokens": matrix(len(unigram), width, 0.02), "positions": matrix(args.length, width, 0.02)}
        for layer in range(args.layers):
            arrays |= {f"{layer}.qkv": matrix(width, 3 * width), f"{layer}.out": matrix(width, width)}
            arrays |= {f"{layer}.up": matrix(width, 4 * width), f"{layer}.down": matrix(4 * width, width)}
            arrays |= {f"{layer}.attention_norm": ones, f"{layer}.hidden_norm": ones}
        self.parameters = pce.shard_parameters(arrays, mesh, PLAN, dim="model")
        matrices, vectors = ([p for p in self.parameters.values() if p.ndim == ndim] for ndim in (2, 1))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = pce.AdamW(groups, args.rate, BETAS, EPS, weight_decay=args.decay)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

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
        whole = {"context": Replicate()} if "context" in self.mesh.dims else {}
        k, v = (each.redistribute(**whole) for each in (k, v))
        attended = pce.scaled_dot_product_attention(q, k, v, causal=True)
        return attended.swapaxes(1, 2).reshape(batch, length, width) @ self.parameters[f"{layer}.out"]

    def hidden(self, x, layer):
        return pce.gelu(x @ self.parameters[f"{layer}.up"]) @ self.parameters[f"{layer}.down"]

    def loss(self, rows):
        shards = {dim: shard for dim, shard in SHARDS.items() if dim in self.mesh.dims}
        ids, targets = (pce.distribute(part, self.mesh, **shards) for part in (rows[:, :-1], rows[:, 1:]))
        return pce.cross_entropy(self.logits(ids), targets)

    def next_logits(self, tokens):
        ids = pce.distribute(np.array([tokens[-self.args.length :]]), self.mesh)
        return self.logits(ids)[0, -1]


def step(model, rows, number, args):
    """Take training step `number`, from 1, on random rows, the same on every rank, and return the loss before it."""
    drawn = np.random.default_rng([args.seed, number]).integers(len(rows), size=args.batch)
    loss = model.loss(rows[drawn])
    loss.backward()
    if args.max_norm:
        pce.clip_grad_norm(model.parameters, args.max_norm)
    for rate, group in zip(model.rates, model.optimizer.param_groups, strict=True):
        group["lr"] = pce.cosine_schedule(number - 1, lr=rate, steps=args.steps, warmup=args.steps // 20)
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss.item(rehearsed=0.0)


def state(model):
    """The parameters and the state of the optimizer, by the names that they are saved under."""
    return model.parameters | {f"optimizer.{name}": array for name, array in model.optimizer.state().items()}


def save(model, path, steps):
    """Save the parameters, the state of the optimizer, and after how many steps they are such."""
    pce.save(path, state(model) | {"steps": pce.distribute(steps, model.mesh)})


def resume(model, path):
    """Load what any mesh saved, and return after how many steps."""
    saved = pce.load(path, model.mesh, state(model))  # placed as what is there already
    for name, array in model.parameters.items():
        if saved[name].shape != array.shape:
            raise ValueError(f"{path} has {name} of shape {saved[name].shape}, these options make it {array.shape}")
    for name, array in model.parameters.items():
        array.local[...] = saved[name].local
    names = [name for name in saved if name.startswith("optimizer.")]
    model.optimizer.load_state({name.removeprefix("optimizer."): saved[name] for name in names})
    return int(saved["steps"].item())


def train(start, mesh, rows, corpus, args):
    """Make a model on `mesh` by `start` and train it; rank 0 shows the progress, writes the log and plots the loss."""
    numbers = range(1, min(3, args.steps) + 1)
    compare_steps(mesh, start, lambda model, number: step(model, rows, number, args), numbers)
    model, here = start(mesh), mesh.rank == 0
    if here:
        own, whole = np.sum([(array.local.size, array.size) for array in model.parameters.values()], axis=0)
        share = f"{own:,} of {whole:,} parameters"
        print(f"training on {len(rows):,} tokens; rank 0 of {mesh.size} holds {share}", flush=True)
    try:
        done = resume(model, args.resume) if args.resume else 0
    except (KeyError, OSError, ValueError) as problem:  # which every rank raises
        stop(mesh.comm(*mesh.dims), f"error: cannot resume {str(args.resume)!r}: {problem}")
    last = max(done, args.stop or args.steps)
    history, begin = list[dict[str, float]](), time.perf_counter()
    with contextlib.closing(Bar("training", last - done, shown=here)) as bar:
        for number in range(done + 1, last + 1):
            loss, seconds = step(model, rows, number, args), time.perf_counter() - begin
            if args.fingerprint:
                digits = pce.fingerprint(model.parameters)
                if here:
                    print(f"step {number}  loss {loss}  parameters {digits}", flush=True)
            history.append({"step": number, "loss": loss, "seconds": round(seconds, 3)})
            bar.finished(f"loss {np.mean([entry['loss'] for entry in history[-50:]]):.3f}, {seconds:.0f} s")
    if args.save:
        save(model, args.save, last)
    if here and args.log:
        write(args.log, "".join(json.dumps(entry) + "\n" for entry in history))
    if here and args.plot:
        plot(args.plot, history, -corpus.unigram()[np.concatenate(corpus.training)].mean(), mesh.size)
    return model


def options():
    parser = training_parser(__doc__, NUMBERS, steps=1000, batch=16, rate=0.01, max_norm=1.0, min_count=10)
    parser.add_argument("--sequence-parallel", action="store_true", help="`model` ranks share sequences between blocks")
    return parser


def program(mesh):
    """Take one training step, of a vocabulary of any size: python -m pce_mpi rehearse runs this function."""
    parser = options()
    parser.add_argument("--vocabulary", type=int, metavar="N", default=10_000, help="tokens of the vocabulary")
    args = parser.parse_args()
    step(GPT(mesh, np.zeros(args.vocabulary), args), np.zeros((1, args.length + 1), np.int64), 1, args)


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    args = parse_arguments(comm, options())
    if args.width % args.heads:
        stop(comm, f"transformer.py: error: a width of {args.width} is no multiple of {args.heads} heads")
    data = args.data or max(1, comm.size // (args.context * args.model))
    try:
        mesh = pce.Mesh(comm, data=data, context=args.context, model=args.model)
    except ValueError as error:
        stop(comm, f"transformer.py: error: {error}")
    corpus = read_corpus(comm, args)
    shortest = min(sum(map(len, files)) + len(files) for files in (corpus.training, corpus.held_out))
    if args.length >= shortest:
        stop(comm, f"transformer.py: error: a length of {args.length} is too long for {shortest} tokens of text")
    training, held_out = (passages(files, args.length + 1) for files in (corpus.training, corpus.held_out))
    model = train(lambda mesh: GPT(mesh, corpus.unigram(), args), mesh, training, corpus, args)
    evaluate(model, corpus, held_out[:: args.length], slice(1, None), args)
