"""Convert weights and configurations from and to Hugging Face's transformers."""
