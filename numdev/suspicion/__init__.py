"""What else a kernel may have computed."""
