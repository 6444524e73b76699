"""`python -m pce_mpi`: the command line."""

from pce_mpi.cli import main

if __name__ == "__main__":
    main()
