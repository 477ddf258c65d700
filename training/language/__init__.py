"""Training of a GPT to predict the next token of a text."""
