"""Prompt data and supervised trajectories: reading, slicing, rendering, and streams with an exact cursor."""

from sleuth.data.prompts import PromptRow, PromptStream, check_labels, check_rows, load_rows
from sleuth.data.sft import SftStream, check_sft_rows, load_sft_rows

__all__ = [
    "PromptRow",
    "PromptStream",
    "SftStream",
    "check_labels",
    "check_rows",
    "check_sft_rows",
    "load_rows",
    "load_sft_rows",
]
