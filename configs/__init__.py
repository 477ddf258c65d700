"""Complete YAML files, one a run, and who reads and explains them, which knows no schema."""
