"""`python -m numdev`."""

from numdev.cli import main

if __name__ == "__main__":
    main()
