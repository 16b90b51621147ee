"""The parts of tools/prepare_data.py: public sets, reading files of any kind, checking rows, writing parquet."""
