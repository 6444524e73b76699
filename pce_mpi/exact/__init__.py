"""Sums, products and functions whose bits depend on the global operands alone."""
