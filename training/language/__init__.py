"""A GPT that learns to predict the next token of a text."""
