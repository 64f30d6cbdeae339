"""`python -m moonep_megatron` prints the table of refused settings, as the README shows it."""

from moonep_megatron.refusals import markdown

if __name__ == "__main__":
    print(markdown())
