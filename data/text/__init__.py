"""Text data of language models: from documents over token shards to batches."""
