"""Problems: cases, the kinds of candidates, exact answers and tolerances."""
