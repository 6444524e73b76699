"""Judge an answer, and measure its errors.

Errors are in ulps: the distance between two neighbours of a dtype. For the gradient that is the logits' dtype. For the
loss it is the one that was returned, but never coarser than the logits', and never finer than that of the arithmetic:
float32 for logits of float16, bfloat16 and float32, and float64 for float64. An ulp is that

- of the exact value, for a loss and for the gradient at a row's target;
- of the row's largest exact entry that is no target's, for the rest of the gradient;
- of a larger term, where terms of label smoothing, z_loss or probabilities cancel against each other in an entry;
- never less than the ulp of 1.0 times the row's upstream gradient in the dtype of the arithmetic. So p - 1 in float32,
  rounded once to bfloat16, passes, and p rounded to bfloat16 before 1 is subtracted does not. A strict judge drops
  this floor.

Nothing grows with the logits: an offset common to all classes does not raise it. Allowed are 32 ulp in float64, 8 in
float32 and 2 in float16 and bfloat16; strict 8, 5 and 1; times a factor. A sum or mean over rows may be off by
log2(rows) ulps of the arithmetic more, as pairwise sums may. Beside an error stands that of the best possible answer,
the exact value rounded, in the same ulps.

An answer must be nan or infinite if the exact value is; a row whose exact gradient has nan must have one. In rows that
`Problem.may_be_nan` selects, nan is right unless the judge is strict.

Logits that are a product hidden @ w + bias are exact. Their rounding is allowed for: the floor is an ulp of the row's
largest sum of magnitudes, and a strict judge keeps it. Errors of dhidden, dw and dbias are in ulps of the largest exact
entry of their row; allowed besides are the errors that pass in the gradient of the logits, multiplied and added up as
independent ones are, and the same number of ulps of the sum of the magnitudes. Beside each error stands that of a plain
product in the dtype of the arithmetic.

For a candidate of `same_bits`, the loss of every rank and the gradient of all shards must also equal what it gives for
the whole problem on one rank: the same dtype and the same bits, 0 and -0 told apart, with one nan for all.
"""
