"""Training of a classifier, on labels or, for pretraining, on the tokens of examples."""
