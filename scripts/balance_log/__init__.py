"""Parts of plot_balance.py: what a run logged of its balance, read back and drawn."""
