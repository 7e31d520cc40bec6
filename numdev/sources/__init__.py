"""Where attention cases come from: shapes, models, pipelines, and tensors on disk."""
