"""`python -m sleuth.doctor`: whether this machine, and a run with given flags, have what they need."""
