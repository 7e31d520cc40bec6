"""Flash attention in Triton with its choices as options."""
