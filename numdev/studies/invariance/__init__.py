"""The same tokens another way: are the numbers the same? `numdev invariance`."""
