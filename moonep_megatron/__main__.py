"""`python -m moonep_megatron` prints the README's tables: features, then refused settings."""

from moonep_megatron import features, refusals

if __name__ == "__main__":
    print(features.markdown(), refusals.markdown(), sep="\n\n")
