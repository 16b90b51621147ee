"""What made `data/demo/`, its model included, and the report of a run of the demo."""
