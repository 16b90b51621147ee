"""Scripts that make, convert and look at things; each is run by itself and says how."""
