"""Count the instructions that the hot loops of the CUDA kernels execute for each logit.

    python benchmarks/count_instructions.py --arch 90

Needs CuPy and NVRTC, which compile as they do for a GPU, nvdisasm (pip install nvidia-cuda-nvdisasm), and no GPU. The
count is that of the shortest way around the loop which passes all its arithmetic: rounds that are whole, with no target
and no coarser grid. A multiprocessor issues 4 instructions of 32 threads a cycle; at the speed of a copy an H200 has
15.6 of them for a bfloat16 logit that is read, and 31 for one that is read and written or a float32 logit that is read.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import NamedTuple

from pce_mpi.kernels.compilation import LOADS, LOOPS, OPTIONS, VECTOR_BYTES, Kernel, source_of

# A block of instructions with so much float32 arithmetic, or so many conversions, is one on vectors of logits.
ARITHMETIC = 30


class Block(NamedTuple):
    """Instructions without a branch into them or out of them, and the blocks that may follow."""

    length: int
    arithmetic: int
    following: list[int]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="90", help="compute capability, such as 80")
    options = parser.parse_args()
    if disassembler() is None:
        print("nvdisasm is missing: pip install nvidia-cuda-nvdisasm", file=sys.stderr)
        return 2
    for kernel in LOOPS:
        print(f"{kernel.name:50} {instructions(kernel, cubin_of(kernel, options.arch)):5.1f}")
    return 0


def cubin_of(kernel: Kernel, arch: str) -> bytes:
    """Return a kernel, compiled as CuPy does."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source_of(kernel.file), kernel.file, (), ())
    nvrtc.addNameExpression(program, kernel.name)
    nvrtc.compileProgram(program, (*OPTIONS, "-ftz=true", f"-arch=sm_{arch}"))
    cubin = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    return bytes(cubin)


def disassembler() -> str | None:
    """Return the path of nvdisasm: that of the package, or one on PATH."""
    package = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvdisasm")
    return str(package) if package.exists() else shutil.which("nvdisasm")


def instructions(kernel: Kernel, cubin: bytes) -> float:
    """Return the instructions that the loop of a kernel, compiled, executes for each logit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin + b"\0")  # which CuPy takes off, as from a text
        file.flush()
        command = [str(disassembler()), "-c", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return around_loop(blocks_of(code)) / (LOADS * VECTOR_BYTES // (4 if "<float," in kernel.name else 2))


def blocks_of(code: str) -> list[Block]:
    """Return the blocks of a kernel in the order of their addresses."""
    starts: dict[str, int] = {}
    bodies: list[list[str]] = [[]]
    for label, instruction in re.findall(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]+\*/\s+(.*?);", code, re.MULTILINE):
        if label:
            if bodies[-1]:
                bodies.append([])
            starts[label] = len(bodies) - 1
        else:
            bodies[-1].append(instruction)
            if re.search(r"\b(BRA|EXIT|RET)\b", instruction):
                bodies.append([])
    blocks = []
    for number, body in enumerate(bodies):
        last = body[-1] if body else ""
        target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", last)
        following = [starts[target[1]]] if target and target[1] in starts else []
        if last.startswith("@") or not re.search(r"\b(BRA|EXIT|RET)\b", last):
            following.append(number + 1)
        arithmetic = sum(("FFMA" in each) + 2 * bool(re.match(r".*(F2F\.|F2I)", each)) for each in body)
        blocks.append(Block(len(body), arithmetic, [block for block in following if block < len(bodies)]))
    return blocks


def around_loop(blocks: list[Block]) -> int:
    """Return the instructions of the shortest way around the main loop that passes all its arithmetic."""
    backward = [(block, at) for at, here in enumerate(blocks) for block in here.following if block <= at]
    first, last = max(backward, key=lambda ends: sum(block.arithmetic for block in blocks[ends[0] : ends[1] + 1]))
    needed = [at for at in range(first, last + 1) if blocks[at].arithmetic >= ARITHMETIC]
    parts = zip([first, *needed], [*needed, last], strict=True)
    return sum(shortest(blocks, begin, end) for begin, end in parts) + blocks[last].length


def shortest(blocks: list[Block], begin: int, end: int) -> int:
    """Return the fewest instructions from one block, which counts, to a later one, which does not."""
    least: dict[int, float] = defaultdict(lambda: float("inf"), {begin: 0.0})
    for at in range(begin, end):
        for block in blocks[at].following:
            if block > at:
                least[block] = min(least[block], least[at] + blocks[at].length)
    return int(least[end])


if __name__ == "__main__":
    sys.exit(main())
