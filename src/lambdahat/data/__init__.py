"""Data sets, each one small file."""

from lambdahat.data.handwriting import digits, digits_split

__all__ = ["digits", "digits_split"]
