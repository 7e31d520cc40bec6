"""An audit on many machines, by Dask."""
