"""Small networks, trained side by side: models, data, variants, and the loop that steps
them."""
