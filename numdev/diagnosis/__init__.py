"""What `numdev diagnose` is asked, finds and says."""
