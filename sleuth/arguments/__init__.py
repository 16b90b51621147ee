"""Every setting of a run: typed, grouped, documented, validated once. Nothing else parses arguments.

    args = parse_args()                                 # command line > --custom-config-path > defaults
    check_files(args)                                   # do the files and folders exist?
    args = check_model(args, read_hf_config(args))      # do the flags fit the model?

`python train.py --help` lists all flags with their defaults.
"""

from sleuth.arguments.args import Args
from sleuth.arguments.files_check import check_files, read_config, read_hf_config
from sleuth.arguments.model_check import check_model, check_model_flags, check_tokenizer, model_flags
from sleuth.arguments.parser import ArgumentsError, build_parser, parse_args, parse_args_or_exit, parse_rest
from sleuth.arguments.run_flags import CheckpointArgs, Group
from sleuth.arguments.table import changes, config_table
from sleuth.arguments.train_flags import ModelArgs

__all__ = [
    "Args",
    "ArgumentsError",
    "CheckpointArgs",
    "Group",
    "ModelArgs",
    "build_parser",
    "changes",
    "check_files",
    "check_model",
    "check_model_flags",
    "check_tokenizer",
    "config_table",
    "model_flags",
    "parse_args",
    "parse_args_or_exit",
    "parse_rest",
    "read_config",
    "read_hf_config",
]
