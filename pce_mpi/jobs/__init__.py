"""Jobs of ranks, from outside: find the launcher, and end all that it started."""
