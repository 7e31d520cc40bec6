"""From distances between weights to the first paper's conclusion."""
