"""`python -m numdev`."""

from numdev.cli import program

if __name__ == "__main__":
    program()
