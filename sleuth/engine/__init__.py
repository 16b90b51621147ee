"""SGLang servers, each a process that a Ray actor owns, and stand-ins for packages that a CPU machine lacks."""
