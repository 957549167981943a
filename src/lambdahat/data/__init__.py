"""Data sets, each one small file: readers of the standard files, and where to get them."""

from lambdahat.data.built_in import (
    digits,
    digits_split,
    synthetic_regression,
    teacher_student,
    xor,
    xord,
)
from lambdahat.data.catalogue import CATALOGUE, check, fetch, load, load_text, register_dataset
from lambdahat.data.image_files import ImageFolder
from lambdahat.data.splits import Split, Text, augment
from lambdahat.data.texts import streams

__all__ = [
    "CATALOGUE",
    "ImageFolder",
    "Split",
    "Text",
    "augment",
    "check",
    "digits",
    "digits_split",
    "fetch",
    "load",
    "load_text",
    "register_dataset",
    "streams",
    "synthetic_regression",
    "teacher_student",
    "xor",
    "xord",
]
