"""SGLang servers: one process each, owned by a Ray actor; stand-ins for what a CPU lacks."""
