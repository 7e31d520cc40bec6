"""`python -m numdev`."""

from numdev.cli.main import program

if __name__ == "__main__":
    program()
