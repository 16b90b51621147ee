"""The controls of the demo: what must not teach the model to search, and what may be left out (`run_controls.py`)."""
