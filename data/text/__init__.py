"""Text on disk as token shards: from documents to batches of a language model."""
