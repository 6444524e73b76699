#!/usr/bin/env bash
# jax 0.10.2 (0.12.0.1 on Python 3.13 gave the same), numpy 2.4.6, CPU, three devices: the maximum of a sharded array with a
# nan. `jnp.max` of one device's array is nan, as NumPy's; of the same array sharded over devices it is a number, the
# maximum of the others, and which one depends on the device that has the nan: nan on the last one also loses the numbers
# beside it. `jnp.min` and `jnp.linalg.norm(x, jnp.inf)` alike; `jnp.argmax`, `jnp.sum` and `logsumexp` see the nan.
# A guesser expects that the placement of an array changes no value.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check jax==0.10.2 numpy==2.4.6 2>"$work/log" ||
    { cat "$work/log"; exit 1; }
cat >"$work/program.py" <<'PYTHON'
import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
jnp = jax.numpy
mesh = jax.make_mesh((3,), ("devices",))
functions = {"max": jnp.max, "min": jnp.min, "sum": jnp.sum, "argmax": jnp.argmax}
seen = []
for owner in range(3):
    array = np.arange(1, 7, dtype=np.float32)
    array[2 * owner] = np.nan
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec("devices")))
    found = {name: float(function(sharded)) for name, function in functions.items()}
    alone = float(jnp.max(jnp.asarray(array)))
    print(f"nan on device {owner}: sharded {found}, max of one device {alone}")
    assert np.isnan(alone) and np.isnan(found["sum"]) and found["argmax"] == 2 * owner, "the behaviour has changed"
    seen.append((found["max"], found["min"]))
assert seen == [(6, 3), (6, 1), (4, 1)], "the behaviour has changed"
PYTHON
"$work/v/bin/python" "$work/program.py" 2>"$work/errors" || { tail -n 5 "$work/errors"; exit 1; }
# Seen:
# nan on device 0: sharded {'max': 6.0, 'min': 3.0, 'sum': nan, 'argmax': 0.0}, max of one device nan
# nan on device 1: sharded {'max': 6.0, 'min': 1.0, 'sum': nan, 'argmax': 2.0}, max of one device nan
# nan on device 2: sharded {'max': 4.0, 'min': 1.0, 'sum': nan, 'argmax': 4.0}, max of one device nan
