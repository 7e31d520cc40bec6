"""Which roundings make a kernel's errors."""
