"""Complete YAML files, one a run, and their reader, which knows no schema."""
