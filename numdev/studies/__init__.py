"""One module per command that computes: the verbs of numdev. All run the same loop (`execute`)."""
