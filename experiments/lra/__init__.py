"""Long Range Arena: its tasks, trained and timed with several attentions and seeds."""
