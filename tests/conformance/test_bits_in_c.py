"""bits.c, which somebody wrote from the page "The bits" alone, has all bits of the vectors."""

import dataclasses
import json
from pathlib import Path
import shutil
import struct
import subprocess

import ml_dtypes
import numpy as np
import pytest

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.offline import vectors as bit_vectors

SOURCE = Path(__file__).with_name("bits.c")
DTYPES = ["float64", "float32", "float16", "bfloat16"]
REDUCTIONS = ["none", "sum", "mean"]
OPTIONS = {"compute_dtype", "logit_scale", "softcap", "label_smoothing", "z_loss", "ignore_index"}
ROWS, CLASSES = SHAPE = 6, 37
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


def load(path):
    """The tensors of a safetensors file; ml_dtypes reads bfloat16."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, is_ in header.items():
        if name != "__metadata__":
            if is_["dtype"] == "BF16":
                dtype = ml_dtypes.bfloat16
            else:
                dtype = NUMPY[is_["dtype"]]
            first, last = (8 + size + offset for offset in is_["data_offsets"])
            tensors[name] = np.frombuffer(data[first:last], dtype).reshape(is_["shape"])
    return tensors


CUTS = ["whole", "splits", "reversed", "alone"]
SPLITS = CUTS.index("splits")


def cut_of(vector, classes, cut):
    """Split points and the order of the merges: none, as given, in reverse, every class alone (shuffled)."""
    splits = vector["splits"]
    shards = len(splits) - 1
    return [
        ([0, classes], [0]),
        (splits, range(shards)),
        (splits, range(shards)[::-1]),
        (range(classes + 1), np.random.default_rng(0).permutation(classes)),
    ][cut]


class Results:
    """What the program prints, number by number."""

    def __init__(self, numbers):
        self.numbers = numbers

    def taken(self, *shape):
        """The next numbers, in that shape."""
        count = int(np.prod(shape))
        first, self.numbers = self.numbers[:count], self.numbers[count:]
        return first.reshape(shape)

    def states(self, expected, shards):
        """The states of so many shards and the merged ones, as bytes."""
        _, rows, size = expected.shape
        return self.taken(shards + 1, rows, size // 8).view(np.uint8)


def problem(vector, tensors, splits, order):
    options = vector["options"]
    assert set(options) <= OPTIONS, "an option that bits.c does not know"
    logits, weight = tensors["logits"], tensors.get("weight")
    rows, classes = logits.shape
    dloss = np.broadcast_to(tensors.get("dloss", 1.0), rows)
    double = vector["dtype"] == "float64" or options.get("compute_dtype") == "float64"
    dtype, reduction = DTYPES.index(vector["dtype"]), REDUCTIONS.index(vector["reduction"])
    statistics, ignore = "entropy" in vector["bits"], options.get("ignore_index", -100)
    header = [rows, classes, len(order), double, dtype, reduction, statistics, weight is not None, ignore]
    numbers = [options.get("logit_scale", 1), options.get("softcap") or 0]
    numbers += [options.get("label_smoothing", 0), options.get("z_loss", 0)]
    parts = [(header, "<i8"), (numbers, "<f8"), (splits, "<i8"), (order, "<i8"), (tensors["targets"], "<i8")]
    parts += [(logits, "<f8"), (np.ones(classes) if weight is None else weight, "<f8"), (dloss, "<f8")]
    return b"".join(np.asarray(part).astype(dtype).tobytes() for part, dtype in parts)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("there is no gcc: a C compiler of that name runs this")
    target = tmp_path_factory.mktemp("bits") / "bits"
    flags = ["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([gcc, *flags, SOURCE, "-lm", "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The vectors in the index, and the tensors of each."""
    folder = tmp_path_factory.mktemp("vectors")
    bit_vectors.export_bits(folder)
    vectors = json.loads((folder / "index.json").read_text())["vectors"]
    return vectors, [load(folder / vector["file"]) for vector in vectors]


def assert_bits(program, vectors, loaded, cut):
    stream = b""
    for vector, tensors in zip(vectors, loaded, strict=True):
        splits, order = cut_of(vector, tensors["logits"].shape[1], cut)
        stream += problem(vector, tensors, splits, order)
    done = subprocess.run([program], input=stream, stdout=subprocess.PIPE, check=True, timeout=300)
    results, wrong = Results(np.frombuffer(done.stdout, "<f8")), []
    for vector, tensors in zip(vectors, loaded, strict=True):
        rows, classes = tensors["logits"].shape
        shards = cut_of(vector, classes, cut)[1]
        loss, reduced = results.taken(rows, 1 + classes), results.taken()
        states = {"loss_states": results.states(tensors["expected_loss_states"], len(shards))}
        found = {"loss": loss[:, 0] if vector["reduction"] == "none" else reduced, "dlogits": loss[:, 1:]}
        if "entropy" in vector["bits"]:
            row = results.taken(rows, 3 + 3 * classes)
            states["statistics_states"] = results.states(tensors["expected_statistics_states"], len(shards))
            found |= dict(zip(("log_prob", "entropy", "logsumexp"), row[:, :3].T, strict=True))
            found |= zip(("dstatistics", "dlog_prob", "dlogsumexp"), np.split(row[:, 3:], 3, axis=1), strict=True)
        for name in vector["bits"]:
            if name in states:
                # Other cuts have other states of shards, and merge to the same.
                of_cut = slice(None) if cut == SPLITS else slice(-1, None)
                if not np.array_equal(states[name][of_cut], tensors["expected_" + name][of_cut]):
                    wrong.append(f"{vector['name']} {name}")
                continue
            is_ = found[name]
            expected = tensors["expected_" + name].astype("<f8")  # exact, so all bits stay
            assert is_.shape == expected.shape
            is_, expected = np.ravel(is_).copy(), expected.ravel()
            same = (is_.view("<i8") == expected.view("<i8")) | (np.isnan(is_) & np.isnan(expected))
            if not same.all():
                first = np.flatnonzero(~same)[0]
                wrong.append(
                    f"{vector['name']} {name}: {(~same).sum()} of {same.size}, "
                    f"at {first} {is_[first].hex()}, expected {expected[first].hex()}"
                )
    assert results.numbers.size == 0
    assert not wrong, f"{len(wrong)} of the results are wrong:\n" + "\n".join(wrong)


@pytest.mark.parametrize("cut", range(4), ids=CUTS)
def test_program_from_page_alone_has_all_bits(program, exported, cut):
    assert_bits(program, *exported, cut)


DTYPES_OF_LOGITS = ["float64", "float64", *DTYPES]  # float64 has the most corners


def random_logits(rng, dtype, scale):
    """Logits of every kind: of usual sizes or of all, near the largest numbers, equal, masked, not finite."""
    most = float(ml_dtypes.finfo(dtype).max)
    x = rng.normal(0, 4, SHAPE)
    rows = rng.integers(0, 7, ROWS)
    few = rng.random(SHAPE)
    x = np.where((rows == 1)[:, None], np.ldexp(x, rng.integers(-1070, 1020, SHAPE)), x)
    x = np.where((rows == 2)[:, None], np.ldexp(x, rng.integers(-30, 62, (ROWS, 1))), x)
    x = np.where((rows == 3)[:, None], most * np.sign(x) * (1 - few * 2.0 ** -rng.integers(1, 53, (ROWS, 1))), x)
    x = np.where((rows == 4)[:, None], x[:, :1] * 2.0 ** rng.integers(0, 1000, (ROWS, 1)), x)
    x = np.where((rows == 5)[:, None] & (few < 0.5), -np.inf, x)
    x = np.where((rows == 6)[:, None] & (few < 0.05), rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, -most], SHAPE), x)
    if rng.random() < 0.3:
        x = x / scale
    return x.astype(dtype)


def random_problem(rng):
    """Options and tensors of a problem, as often as not at the ends of float64."""
    name = rng.choice(DTYPES_OF_LOGITS)
    scale = float(rng.choice([1.0, 1.0, 0.5, 0.7, 1e-3, 1e-300, 64.0, 2.0**-40]))
    options = {"reduction": str(rng.choice(REDUCTIONS)), "logit_scale": scale}
    if rng.random() < 0.2:
        options["softcap"] = float(rng.choice([1.0, 30.0, 1e5]))
    if rng.random() < 0.2:
        options["ignore_index"] = int(rng.integers(0, CLASSES))
    if name != "float64" and rng.random() < 0.3:
        options["compute_dtype"] = "float64"
    tensors = {"logits": random_logits(rng, dtype_named(name), scale), "targets": rng.integers(0, CLASSES, ROWS)}
    if rng.random() < 0.5:
        options["label_smoothing"] = float(rng.choice([0.1, 0.1, 1e-10, 1.0]))
    if rng.random() < 0.2:
        options["z_loss"] = float(rng.choice([1e-4, 2.0**1015]))
    if rng.random() < 0.5:
        sizes = rng.choice([(0, 1), (-1073, -1000), (-1073, 1025), (1020, 1025)])
        tensors["weight"] = np.ldexp(1 - rng.random(CLASSES) / 2, rng.integers(*sizes, CLASSES))
        if rng.random() < 0.3:
            tensors["weight"] *= rng.choice([1.0, -1.0, 0.0, np.inf, -np.inf], CLASSES, p=[0.8, 0.08, 0.08, 0.02, 0.02])
    if rng.random() < 0.5:
        shape = ROWS if options["reduction"] == "none" else ()
        tensors["dloss"] = rng.choice([-0.0, 0.0, -1.5, 1e300, 1e-300], shape) * rng.random(shape)
    return options, tensors


@pytest.mark.parametrize("seed", range(3))
def test_program_has_bits_of_random_problems(program, seed):
    vectors, loaded = [], []
    with np.errstate(all="ignore"):
        for place in range(100):
            options, tensors = random_problem(np.random.default_rng([seed, place]))
            entry, tensors = bit_vectors.vector_of(f"random/{place}", options, **tensors)
            vectors.append(dataclasses.asdict(entry))
            loaded.append(tensors)
    assert_bits(program, vectors, loaded, SPLITS)
