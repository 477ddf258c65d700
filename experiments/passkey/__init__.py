"""Pass-key retrieval by attention and context length."""
