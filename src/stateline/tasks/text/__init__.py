"""Tasks on texts: language modelling, and classification of token sequences."""
