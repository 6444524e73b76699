"""Files of other programs as answers: vectors, bits and recordings."""
