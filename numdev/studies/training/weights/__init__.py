"""How far apart two sets of weights are."""
