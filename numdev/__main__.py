"""`python -m numdev`."""

from numdev.cli.main import main

if __name__ == "__main__":
    main()
