"""Runs ``asa`` as ``python -m asa``."""

from asa.cli import main

if __name__ == "__main__":
    main()
