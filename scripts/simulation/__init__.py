"""Parts of simulate.py: routing in, quality and predicted times of plans out."""
