"""Long Range Arena: its tasks, attentions and seeds, trained and timed."""
