"""Train a Hugging Face transformers model with Papilio's attention.

    pip install transformers
    python examples/transformers_model.py

A small Llama with random weights learns this file byte by byte. Prints the loss of every tenth
step: it starts at 5.6 nats, because all 256 bytes are equally likely, and falls below 2.5.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import papilio

BATCH, CONTEXT = 8, 128
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

papilio.register_with_transformers()
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="papilio").to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
for step in range(61):
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), device=device)
    tokens = text[starts + torch.arange(CONTEXT, device=device)]  # (B, T)
    loss = model(tokens, labels=tokens).loss  # transformers shifts the labels
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:2}: loss {loss.item():.2f}")
