"""What a trained run is worth, and how sure that is."""
