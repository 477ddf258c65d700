"""Table 4 of the FlashAttention paper: GPTs with contexts of 1K to 16K, trained and compared."""
