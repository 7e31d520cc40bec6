"""numdev: numeric-deviation audits for attention. Importing it imports nothing heavy."""

__version__ = "0.1.0"
