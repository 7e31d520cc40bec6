"""One function on small cases with known answers."""
