"""Log-probabilities of the same tokens from two programs: who is off, and why?
`numdev logprobs`."""
