"""Train a small GPT on Python's standard library, with the batch, the sequences and the layers sharded as you choose.

    mpiexec -n 4 python -m mpi4py examples/transformer.py --data 2 --model 2 --sequence-parallel

The model is in gpt.py. On any mesh and any number of ranks the losses are those of one process, up to rounding, and a
mesh can resume from parameters that another mesh saved:

    mpiexec -n 2 python -m mpi4py examples/transformer.py --model 2 --stop 500 --save half.safetensors
    mpiexec -n 3 python -m mpi4py examples/transformer.py --context 3 --resume half.safetensors
"""

from mpi4py import MPI

from command_line import parse_arguments
from comparison import stop
from corpus import passages, read_corpus
from evaluation import evaluate
from gpt import GPT
import pce_mpi as pce
from training import train
from training_options import training_parser

NUMBERS = (
    ("layers", 1, 2, "layers, each of attention and hidden units"),
    ("heads", 1, 12, "attention heads in a layer"),
    ("width", 1, 96, "length of the vector that stands for a token, a multiple of the heads"),
    ("length", 1, 32, "tokens of a sequence"),
    ("data", 0, 0, "ranks that share the batch; 0: as many as the others leave"),
    ("context", 1, 1, "ranks that share each sequence"),
    ("model", 1, 1, "ranks that share heads, hidden units and vocabulary"),
)

if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    parser = training_parser(__doc__, NUMBERS, steps=1000, batch=16, rate=1.0, max_norm=1.0, min_count=10)
    parser.add_argument("--sequence-parallel", action="store_true", help="`model` ranks share sequences between blocks")
    args = parse_arguments(comm, parser)
    if args.width % args.heads:
        stop(comm, f"transformer.py: error: a width of {args.width} is no multiple of {args.heads} heads")
    data = args.data or max(1, comm.size // (args.context * args.model))
    try:
        mesh = pce.Mesh(comm, data=data, context=args.context, model=args.model)
    except ValueError as error:
        stop(comm, f"transformer.py: error: {error}")
    corpus = read_corpus(comm, args)
    training, held_out = (passages(files, args.length + 1) for files in (corpus.training, corpus.held_out))
    model = train(lambda mesh: GPT(mesh, corpus.unigram(), args), mesh, training, corpus, args)
    evaluate(model, corpus, held_out[:: args.length], slice(1, None), args)
