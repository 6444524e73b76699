"""Problems: cases, the kinds of candidates, and exact answers."""
