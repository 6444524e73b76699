#!/usr/bin/env bash
# paddlepaddle 3.3.1 (CPU), numpy 2.4.6: the mean of cross_entropy divides by all rows if ignore_index is below 0.
# `paddle.nn.functional.cross_entropy` takes ignore_index=-100 unless told, as PyTorch does, whose mean divides by the rows
# that count. With three rows of which two have the target -100 it gives a third of that loss and of its gradient: 0.8025
# for 2.4076. The same rows ignored by ignore_index=1 give 2.4076: its source counts the rows if ignore_index >= 0 alone.
# All rows ignored: 0.0, where PyTorch has nan.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/v"
"$work/v/bin/pip" install -q --no-compile --disable-pip-version-check paddlepaddle==3.3.1 numpy==2.4.6 2>"$work/log" ||
    { cat "$work/log"; exit 2; }
cat >"$work/program.py" <<'PYTHON'
import numpy as np
import paddle
from paddle.nn.functional import cross_entropy

logits = np.array([[1, 2, 3], [0, 0, 1], [2, 1, 0]], np.float32)
due = float(np.log(np.exp(logits[0].astype(np.float64)).sum()) - logits[0, 0])
found = {}
for ignore_index in (-100, -7, 1):
    x = paddle.to_tensor(logits)
    x.stop_gradient = False
    targets = paddle.to_tensor(np.array([0, ignore_index, ignore_index]))
    loss = cross_entropy(x, targets, ignore_index=ignore_index)
    loss.backward()
    found[ignore_index] = float(loss)
    print(f"ignore_index={ignore_index}: loss {float(loss):.4f}, due {due:.4f}, gradient {x.grad.numpy()[0].round(4)}")
everything = float(cross_entropy(paddle.to_tensor(logits), paddle.to_tensor(np.array([-100, -100, -100]))))
print(f"every row ignored: {everything}")
assert abs(found[1] - due) < 1e-5
assert abs(found[-100] - due / 3) < 1e-5 and abs(found[-7] - due / 3) < 1e-5
assert everything == 0.0
PYTHON
"$work/v/bin/python" "$work/program.py" 2>/dev/null
# Seen:
# ignore_index=-100: loss 0.8025, due 2.4076, gradient [-0.3033  0.0816  0.2217]
# ignore_index=-7: loss 0.8025, due 2.4076, gradient [-0.3033  0.0816  0.2217]
# ignore_index=1: loss 2.4076, due 2.4076, gradient [-0.91    0.2447  0.6652]
# every row ignored: 0.0
