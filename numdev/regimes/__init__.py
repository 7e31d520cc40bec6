"""The regimes synthetic inputs are drawn by."""
