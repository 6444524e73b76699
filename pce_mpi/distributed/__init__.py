"""Global arrays over a mesh of ranks: placements, shardings, and the way from one to another."""
