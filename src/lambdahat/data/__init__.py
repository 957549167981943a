"""Data sets, each one small file: readers of the standard files, and where to get them."""

from lambdahat.data.augmentation import augment
from lambdahat.data.catalogue import CATALOGUE
from lambdahat.data.handwriting import digits, digits_split
from lambdahat.data.imagenet import ImageFolder
from lambdahat.data.loading import check, fetch, load, load_text
from lambdahat.data.logic import xor, xord
from lambdahat.data.splits import Split
from lambdahat.data.synthetic import synthetic_regression, teacher_student
from lambdahat.data.texts import Text, streams

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
    "streams",
    "synthetic_regression",
    "teacher_student",
    "xor",
    "xord",
]
