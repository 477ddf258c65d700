"""A training step of GPT-2: its speed, its losses with other attentions, and its start-up."""
