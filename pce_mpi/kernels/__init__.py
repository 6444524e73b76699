"""The two hot loops, once per device: fill one record per row, and write the gradient of the logits."""
