"""Long documents, classified by a fine-tuned GPT."""
