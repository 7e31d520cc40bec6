"""The main line: every case through every kernel, measured, and journalled."""
