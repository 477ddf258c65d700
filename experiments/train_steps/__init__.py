"""A training step of GPT-2: its speed, and its losses under other attentions."""
