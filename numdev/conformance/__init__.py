"""One kernel by itself, feature by feature."""
