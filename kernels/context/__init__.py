"""Context parallelism: attention of sequences that are sharded over processes."""
